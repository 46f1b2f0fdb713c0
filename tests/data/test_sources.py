"""The table of public data sets: rows are well-formed, URLs are exact, licences are found."""

import re

import pytest

from data.read.listing import list_source
from data.source import fineweb_edu
from data.sources import SOURCES, license_of, named_source
from pipeline.errors import InputError

EACH = {  # a subset that a row's expression matches
    "fineweb-edu": "CC-MAIN-2024-10",
    "fineweb": "CC-MAIN-2013-20",
    "fineweb-2": "deu_Latn",
    "dclm": "global-shard_03_of_10",
    "cosmopedia": "stanford",
    "finepdfs": "eng_Latn",
    "wikipedia": "20231101.de",
    "starcoderdata": "python",
}


@pytest.mark.parametrize("known", SOURCES, ids=lambda known: known.name)
def test_rows_are_well_formed(known):
    assert re.fullmatch(r"[a-z0-9-]+", known.name)
    assert re.fullmatch(r"[0-9a-f]{40}", known.revision)
    assert known.subsets or known.each
    assert bool(known.each) == (known.name in EACH)
    for subset in [*known.subsets, *filter(None, [EACH.get(known.name)])]:
        url = named_source(known.name, subset)
        assert url.startswith(f"hf://datasets/{known.repository}@{known.revision}/")
        assert url.endswith(".parquet")
        assert "{" not in url
        assert list_source(url, 1.0).pinned == f"commit {known.revision}"  # without a request
        assert license_of(url) == (known.repository, known.license)


def test_rows_are_different():
    for each in (
        [known.name for known in SOURCES],
        [name for known in SOURCES for name in (known.repository, *known.copies)],
    ):
        assert len(set(each)) == len(each)


def test_urls():
    assert named_source("fineweb-2", "deu_Latn") == (
        "hf://datasets/HuggingFaceFW/fineweb-2@af9c13333eb981300149d5ca60a8e9d659b276b9"
        "/data/deu_Latn/train/*.parquet"
    )
    for subset in ("sample-10BT", "default", "CC-MAIN-2024-10"):
        assert named_source("fineweb-edu", subset) == fineweb_edu(subset)
    other = named_source("climbmix", revision="0" * 40)
    assert other == f"hf://datasets/karpathy/climbmix-400b-shuffle@{'0' * 40}/shard_*.parquet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("c4",), "'c4' is unknown; use one of fineweb-edu, fineweb, "),
        (("fineweb-2",), r"fineweb-2: subset=None is unknown; use one that matches"),
        (("fineweb-2", "../x"), r"subset='\.\./x' is unknown"),
        (("climbmix", "x"), "climbmix: subset='x' is unknown; use default"),
        (("fineweb", None, "main"), "fineweb: revision='main' is not a full commit hash"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(InputError, match=message):
        named_source(*arguments)


@pytest.mark.parametrize(
    ("url", "license", "commercial"),
    [
        ("hf://datasets/HuggingFaceFW/fineweb/sample/10BT/*.parquet", "ODC-By 1.0", True),
        ("hf://datasets/HuggingFaceFW/fineweb@main/data", "ODC-By 1.0", True),
        ("hf://datasets/nvidia/ClimbMix", "CC BY-NC 4.0", False),
        (
            "https://huggingface.co/datasets/wikimedia/wikipedia/resolve/main/x.parquet",
            "CC BY-SA 3.0 and GFDL",
            True,
        ),
    ],
)
def test_licenses_of_urls(url, license, commercial):
    found = license_of(url)
    assert found
    assert (found[1].name, found[1].commercial) == (license, commercial)


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/HuggingFaceFW/fineweb-edu-score-2/data",
        "hf://datasets/someone/fineweb",
        "hf://models/HuggingFaceFW/fineweb",
        "https://example.org/datasets/HuggingFaceFW/fineweb",
        "./HuggingFaceFW/fineweb",
        "python-docs://3.12.1",
    ],
)
def test_no_license_is_guessed(url):
    assert license_of(url) is None
