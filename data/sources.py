"""Public data sets by name: repository, pinned revision, subsets and licence.

    named_source("fineweb-2", "deu_Latn")
    -> hf://datasets/HuggingFaceFW/fineweb-2@af9c1333.../data/deu_Latn/train/*.parquet

Licences are those of the data sets' cards; a licence of a collection is none of its texts. This
module imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.errors import InputError

_DUMP = r"CC-MAIN-\d{4}-\d{2}"
_LANGUAGE = r"[a-z]{3}_[A-Z][a-z]{3}"
_HUB = re.compile(
    r"(?:hf://|https://huggingface\.co/)datasets/(?P<repository>[^/@]+/[^/@]+)(?:[/@]|$)"
)
_SAMPLES = {f"sample-{size}": f"sample/{size}/*.parquet" for size in ("10BT", "100BT", "350BT")}


@dataclass(frozen=True)
class License:
    """A licence by its name, and whether it permits commercial use."""

    name: str
    commercial: bool = True

    def __str__(self) -> str:
        return self.name if self.commercial else f"{self.name}, which forbids commercial use"


ODC_BY = License("ODC-By 1.0")


@dataclass(frozen=True)
class KnownSource:
    """One data set of the hub.

    Attributes:
        revision: commit that is read unless another one is given.
        subsets: pattern of files by name of the subset; the first is the default.
        each: (expression, pattern of files) of subsets that are not listed by name.
        copies: repositories with the same documents, under the same licence.
    """

    name: str
    repository: str
    revision: str
    license: License
    subsets: Mapping[str, str] = field(default_factory=dict)
    each: tuple[str, str] | None = None
    copies: tuple[str, ...] = ()

    def files(self, subset: str | None) -> str:
        """The pattern of a subset's files, inside the repository."""
        if subset is None and self.subsets:
            return next(iter(self.subsets.values()))
        if subset in self.subsets:
            return self.subsets[subset]
        if subset is not None and self.each and re.fullmatch(self.each[0], subset):
            return self.each[1].format(subset)
        known = [*self.subsets, *([f"one that matches {self.each[0]}"] if self.each else [])]
        raise InputError(f"{self.name}: subset={subset!r} is unknown; use {' or '.join(known)}")


SOURCES = (
    KnownSource(
        "fineweb-edu",
        "HuggingFaceFW/fineweb-edu",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        ODC_BY,
        subsets={**_SAMPLES, "default": "data/*/*.parquet"},
        each=(_DUMP, "data/{}/*.parquet"),
        copies=("karpathy/fineweb-edu-100b-shuffle",),
    ),
    KnownSource(
        "fineweb",
        "HuggingFaceFW/fineweb",
        "9bb295ddab0e05d785b879661af7260fed5140fc",
        ODC_BY,
        subsets={**_SAMPLES, "default": "data/*/*.parquet"},
        each=(_DUMP, "data/{}/*.parquet"),
    ),
    KnownSource(
        "fineweb-2",
        "HuggingFaceFW/fineweb-2",
        "af9c13333eb981300149d5ca60a8e9d659b276b9",
        ODC_BY,
        each=(_LANGUAGE, "data/{}/train/*.parquet"),
    ),
    KnownSource(
        "dclm",
        "mlfoundations/dclm-baseline-1.0-parquet",
        "817d6752765f6a41261085171dd546b104f60626",
        License("CC BY 4.0"),
        subsets={"default": "filtered/**/*.parquet"},
        each=(
            r"global-shard_\d{2}_of_10",
            "filtered/OH_eli5_vs_rw_v2_bigram_200k_train/"
            "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train/processed_data/"
            "{}/*/*.parquet",
        ),
        copies=("mlfoundations/dclm-baseline-1.0",),
    ),
    KnownSource(
        "climbmix",
        "karpathy/climbmix-400b-shuffle",
        "915333b4f8b8684f39aeaafea600fea6f43fb703",
        License("CC BY-NC 4.0", commercial=False),
        subsets={"default": "shard_*.parquet"},
        copies=("nvidia/ClimbMix", "nvidia/Nemotron-ClimbMix", "OptimalScale/ClimbMix"),
    ),
    KnownSource(
        "cosmopedia",
        "HuggingFaceTB/cosmopedia",
        "0ae6ec63f91742bd2d1eaef4f02232c55d719385",
        License("Apache 2.0"),
        subsets={"default": "data/*/*.parquet"},
        each=(r"[a-z0-9_]+", "data/{}/*.parquet"),
    ),
    KnownSource(
        "finepdfs",
        "HuggingFaceFW/finepdfs",
        "220bac3acbf07789502c621d2d33952f51ac7f86",
        ODC_BY,
        each=(_LANGUAGE, "data/{}/train/*.parquet"),
    ),
    KnownSource(
        "finemath",
        "HuggingFaceTB/finemath",
        "e92b25a616738fe95dc186b64dfb19f9c8525594",
        ODC_BY,
        subsets={
            f"{name}-{least}plus": f"{name}-{least}plus/*.parquet"
            for name in ("finemath", "infiwebmath")
            for least in (3, 4)
        },
    ),
    KnownSource(
        "open-web-math",
        "open-web-math/open-web-math",
        "fde8ef8de2300f5e778f56261843dab89f230815",
        ODC_BY,
        subsets={"default": "data/*.parquet"},
    ),
    KnownSource(
        "wikipedia",
        "wikimedia/wikipedia",
        "b04c8d1ceb2f5cd4588862100d08de323dccfbaa",
        License("CC BY-SA 3.0 and GFDL"),
        subsets={"20231101.en": "20231101.en/*.parquet"},
        each=(r"20231101\.[a-z-]+", "{}/*.parquet"),
    ),
    KnownSource(
        "starcoderdata",
        "bigcode/starcoderdata",
        "9fc30b578cedaec69e47302df72cf00feed7c8c4",
        License("the terms of The Stack and the licences of its files"),
        each=(r"[a-z][a-z0-9-]*", "{}/*.parquet"),
    ),
)


def named_source(name: str, subset: str | None = None, revision: str | None = None) -> str:
    """URL of a data set of `SOURCES` at one revision of the hub.

    Args:
        subset: a name of the row's `subsets`, or one that its `each` matches; None for the first.
        revision: commit of the repository, 40 hexadecimal digits; None for the pinned one.
    """
    known = {source.name: source for source in SOURCES}
    if name not in known:
        raise InputError(f"named_source: {name!r} is unknown; use one of {', '.join(known)}")
    source = known[name]
    commit = source.revision if revision is None else revision
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise InputError(
            f"{name}: revision={commit!r} is not a full commit hash (40 hexadecimal "
            "digits); a branch can move, so give the commit it points to"
        )
    return f"hf://datasets/{source.repository}@{commit}/{source.files(subset)}"


def license_of(source: str) -> tuple[str, License] | None:
    """(repository, licence) of the URL of a data set of `SOURCES`; None of any other source."""
    if not (found := _HUB.match(source)):
        return None
    repository = found["repository"]
    for known in SOURCES:
        if repository in (known.repository, *known.copies):
            return repository, known.license
    return None
