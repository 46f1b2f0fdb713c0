"""Names that people give: what cannot be a plain path is refused before anything is done."""

from __future__ import annotations

import glob
import itertools
import os
import unicodedata
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline import Experiment, InputError, Result, StepContext, named, step
from pipeline.errors import StepFailed
from pipeline.graph.step import StepSpec, as_node
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, numbers, write_numbers

_PLAINLY_WRONG = r"""
    .. ../x a/../b a/.. ../../etc/passwd ./a . a/. a//b a/ /etc/passwd //host/share ~root/../x C:\x
    ..\x a\b file:x gs://other/x simplecache::x a::b data:,x %2e%2e%2fx a%00b a. a/b. ... -rf --help
    a/-b a* a? a[0] a{b} a.tmp a/b.tmp a.tmp/b a#1 a|b a;b a$b a`b` a&b a'b a"b a:b a<b> $(x) !x
"""
HOSTILE = [*_PLAINLY_WRONG.split(), "", "a\0b", "a\nb", "a\tb", "a\x1b[2Jb", "a\x7f", "a b", " a"]
HOSTILE += ["x" * 256, "a/" + "x" * 300, "\u4e2d" * 100, "\uff0e\uff0e\uff0fx", "a\u2215b", "\xe9"]
HOSTILE += ["a\u202eb", "\u0430", "e\u0301", "a\u200bb", "\ufeffa", "\udcff", "a\u2028b"]
PLAIN = ["a", "a/b", "train/00003", ".zarray", "c/0/0", "00000008.000001-3f", "x" * 255, "A_b=+@,-"]
# Names whose record would have the place of another name's.
UNRECORDABLE = ["a~b", "~", "a/b~c", "~a", "x" * 252, "/".join(["d" * 40] * 7)]


@step(output=Numbers, version=1)
def write_named(run: StepContext, *, names: tuple[str, ...], mapped: bool = False) -> Result:
    """One shard for every name, by either of the two ways there are."""
    if mapped:
        run.map(write_numbers, {name: (index, 1) for index, name in enumerate(names)})
    else:
        for index, name in enumerate(names):
            with run.shard(name) as directory:
                write_numbers(directory, (index, 1))
    return {}


@step(output=Numbers, version=1)
def write_link(run: StepContext, *, kind: str, target: str) -> Result:
    with run.shard("part/0") as directory:
        path = storage.local_path(directory)
        if kind == "whole":
            os.rmdir(path)
            os.symlink(os.path.dirname(target), path)
        else:
            write_numbers(directory, (0, 1))
            inner = os.path.join(path, "inner")
            os.makedirs(inner)
            if kind == "pipe":
                os.mkfifo(os.path.join(inner, "x"))
            else:
                os.symlink(target, os.path.join(inner, "x"))
    return {}


def _everything(directory: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else p.is_symlink()
        for p in sorted(directory.rglob("*"))
    }


@pytest.fixture
def no_access(monkeypatch):
    """Any look at a store is an error while this is in use."""

    def refuse(url: str) -> Any:
        raise AssertionError(f"looked at {url!r}")

    monkeypatch.setattr(storage, "filesystem", refuse)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_refused_before_any_access(no_access, name):
    """As only part and as last of several; the message shows the name without printing it raw."""
    roots = ("/root", "gs://bucket/x", "memory://x", "relative")
    places = ((name,), ("attempts", name), (name, "n.txt"))
    for root, parts in itertools.product(roots, places):
        with pytest.raises(InputError, match="plain relative path") as caught:
            storage.join(root, *parts)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names_are_taken_as_they_are(name):
    """What steps, TensorStore and the engine call their files."""
    assert storage.join("/root", name) == f"/root/{name}"
    assert storage.join("gs://b/", name, "x") == f"gs://b/{name}/x"


# Whole runs, so a sample of the names: each is refused by `storage.join` in the test above.
@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", [*HOSTILE[::24], *UNRECORDABLE[2:]], ids=ascii)
def test_a_step_cannot_write_a_shard_of_a_hostile_name(tmp_path, name, mapped):
    """The step fails with the reason; nothing appears beside its own log, lease and events."""
    store, outside = tmp_path / "a" / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    before = _everything(outside)
    with pytest.raises((InputError, StepFailed), match=r"plain relative path|surrogates|'~'"):
        bring_up(str(store), write_named(names=(name,), mapped=mapped))
    assert _everything(outside) == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "outside"} - (
        set() if store.exists() else {"a"}
    )
    written = {path.name for path in store.rglob("*") if path.is_file()}
    assert not any(name.startswith("n.txt") or name == "manifest.json" for name in written)


ALPHABET = st.sampled_from([*"aA.0-_~/%:\\ \n*", "..", "\u2215", "\uff0e", "e\u0301", ".tmp"])
NAMES = st.lists(ALPHABET, max_size=8).map("".join) | st.text(max_size=40)


@settings(max_examples=50)
@given(NAMES)
def test_what_is_taken_stays_below_the_root_and_means_itself(name):
    """Taken names are below the root in every reading: path, URL, glob, chain, Unicode forms."""
    try:
        joined = storage.join("/root", name)
    except InputError:
        return
    assert joined == f"/root/{name}"
    assert os.path.normpath(joined) == joined
    assert Path("/root") in Path(joined).parents
    assert urllib.parse.unquote(joined) == joined
    assert urllib.parse.urlsplit(joined).path == joined
    assert unicodedata.normalize("NFKD", joined) == joined
    assert not glob.has_magic(joined)
    assert storage.filesystem(joined)[1] == joined
    assert storage.filesystem(storage.join("memory://root", name))[1] == joined


# Short names of few letters, so that two of them often differ in one character.
SHARDS = st.text("aA/~.", min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=100)
@given(SHARDS, SHARDS)
def test_two_shards_never_share_a_record(first, second):
    """Whatever two names are recorded, both are there afterwards, each with its own files."""
    assume(first != second)
    ledger = Ledger(f"memory://{uuid.uuid4().hex}")
    recorded = {}
    for index, name in enumerate((first, second)):
        directory = f"{ledger.root}/attempts/{index}"
        write_numbers(directory, (index, 1))
        try:
            recorded[name] = ledger.add(name, directory, {"index": index})
        except InputError:
            continue
    assert ledger.finished() == recorded
    assert all(recorded[name].name == name for name in recorded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["out", "directory", "inside", "broken", "whole", "pipe"])
def test_an_output_with_a_link_in_it_is_refused(tmp_path, kind):
    """A link or a pipe is neither followed nor recorded, wherever it points; the step fails."""
    store, secret = tmp_path / "store", tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text("the canary")
    target = {
        "directory": str(secret.parent),
        "inside": "../n.txt",
        "broken": str(tmp_path / "nowhere"),
    }.get(kind, str(secret))
    with pytest.raises(StepFailed, match="symbolic link"):
        bring_up(str(store), write_link(kind=kind, target=target))
    assert secret.read_text() == "the canary"
    files = [path for path in store.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    assert not any(b"canary" in path.read_bytes() for path in files)
    assert not any(path.name == "manifest.json" for path in files)


def test_a_file_called_tmp_is_not_lost_in_silence(tmp_path):
    """Only our own unfinished writes are passed over; another `.tmp` is listed, then refused."""
    (tmp_path / "a.tmp").write_text("x")
    (tmp_path / f"b.{uuid.uuid4().hex}.tmp").write_text("unfinished")
    assert [name for name, _ in storage.list_files(str(tmp_path))] == ["a.tmp"]
    shard = tmp_path / "step" / "attempts" / "000001-a" / "shards"
    shard.mkdir(parents=True)
    (shard / "weights.tmp").write_text("x")
    with pytest.raises(InputError, match=r"\.tmp"):
        Ledger(str(tmp_path / "step")).add("a", str(shard), {})


STORES = [
    *("", " ", "runs ", "\n", "a\nb", "a\0b", "a\x1b[2J", "a\u202eb", "\udcff", "a::b", "zip::x"),
    *("gs:/bucket", "gs:bucket", "file:x", "data:,x", "C:\\x", "gs://", "gs:///x", "gs://b/../c"),
    *("gs://b//c", "gs://b/./c", "gs://b/*", "gs://b/x?y", "gs://b/x#1", "GS://b", "nosuch://b"),
    *("~no_such_user_here/x",),
]


@pytest.mark.parametrize("url", STORES, ids=ascii)
def test_stores_that_cannot_be_are_refused(url, tmp_path, monkeypatch, capsys):
    """`--prefix` that is no path and no URL: status 1, one line, nothing made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="expected a path or a URL"):
        storage.normalise(url)
    with pytest.raises(SystemExit) as stop:
        Experiment(lambda count=2: numbers(count=count)).main(["plan", f"--prefix={url}"])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: store ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("runs", "{cwd}/runs"),
        ("./a:b", "{cwd}/a:b"),
        ("-x", "{cwd}/-x"),
        ("my runs/größe", "{cwd}/my runs/größe"),
        ("%2e%2e", "{cwd}/%2e%2e"),
        ("/abs/", "/abs"),
        ("file:///abs", "/abs"),
        ("memory://x/", "memory://x"),
        ("gs://bucket/", "gs://bucket"),
        ("gs://bucket/dir", "gs://bucket/dir"),
        ("gcs://bucket/dir/", "gs://bucket/dir"),
    ],
)
def test_odd_but_possible_stores_are_taken(url, expected, tmp_path, monkeypatch):
    """Spaces, accents, a leading dash or percent signs are the user's right, in a store."""
    monkeypatch.chdir(tmp_path)
    assert storage.normalise(url) == expected.format(cwd=tmp_path)


LABELS = [
    *("", " ", " a", "a ", "a\nb", "a\tb", "a\0", "a\x1b[31mb", "a\u202eb", "a\u200b", "\udcff"),
    *("-a", "--help", "a/b", "../a", "a\\b", "x" * 65, None, 3, b"a", ("a",)),
]


@pytest.mark.parametrize("label", LABELS, ids=ascii)
def test_hostile_display_names_are_refused(label):
    """What a log line, a flag or a terminal could not carry; the node keeps its name."""
    node = numbers(count=2)
    with pytest.raises(InputError, match="named"):
        named(node, label)
    assert as_node(node).label == "numbers"


@pytest.mark.parametrize(
    "name", ["<lambda>", "../x", "a b", "", "größe", "a\nb", "x-y", "a.b", "1"]
)
def test_a_step_whose_name_cannot_be_a_directory_is_refused(name):
    """Where it is declared, not when it has run for hours."""

    def body(run):
        return {}

    with pytest.raises(InputError, match="name of a directory"):
        StepSpec(body, Numbers, 1, name)
    body.__name__ = name
    assert step(output=Numbers, version=1, name="fine")(body).name == "fine"
