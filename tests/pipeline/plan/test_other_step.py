"""Two different steps of one name in one store: one is never given the output of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import steps
from pipeline.errors import InputError, StepFailed
from pipeline.execute.reference import adopt, choose
from pipeline.graph.step import as_node
from pipeline.plan.plan import plan
from pipeline.plan.state import other_step, read_state
from pipeline.store import manifest, storage
from pipeline.store.outputs import Store
from tests.pipeline.code_versions import load, mapped
from tests.pipeline.helpers import bring_up, planned, result
from tests.pipeline.toy import numbers

THEIRS = '''
from pipeline import Result, StepContext, step
from tests.pipeline.toy import Numbers


@step(output=Numbers, version=1)
def clean(run: StepContext, numbers: Numbers, *, threshold: float = 0.5) -> Result:
    """Somebody's step."""
    kept = [value for value in numbers.values() if value > threshold]
    return {"made_by": "them", "kept": kept}
'''
OURS = '''
from pipeline import Result, StepContext, step
from tests.pipeline.toy import Numbers


@step(output=Numbers, version=1)
def clean(run: StepContext, numbers: Numbers, *, threshold: float = 0.5) -> Result:
    """Another step, whose author took the same name."""
    lost = 0
    for value in numbers.values():
        lost += value / 2 < threshold
    run.progress(1, 1, "step")
    return {"made_by": "us", "lost": lost}
'''
WORK = '''
from pipeline import Result, StepContext, step
from tests.pipeline.toy import Numbers


@step(output=Numbers, version=1)
def work(run: StepContext, *, count: int = 4) -> Result:
    """Also a step of a common name."""
    run.progress(1, 1, "step")
    return {"made_by": "us", "squares": [number**2 for number in range(count)]}
'''
ANOTHER = "that of another step named 'clean', in "


@pytest.fixture
def store(tmp_path) -> str:
    prefix = str(tmp_path / "store")
    bring_up(prefix, node(tmp_path / "them" / "first.py", THEIRS))
    return prefix


def node(path: Path, text: str, count: int = 4) -> Any:
    return load(path, text).clean(numbers(count=count))


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_the_output_of_another_step_is_refused(store, tmp_path, own):
    """Both files and the remedies are named; --force builds this one's, a name of its own too."""
    mine = node(tmp_path / "us" / "second.py", OURS)
    prefix, shared = (store, ()) if own else (str(tmp_path / "mine"), (store,))
    entry = planned(prefix, mine, shared)
    assert (entry.status, entry.refused, entry.reused) == ("foreign", True, False)
    with pytest.raises(InputError) as refused:
        bring_up(prefix, mine, shared=shared)
    for said in (str(refused.value), entry.reason):
        assert f"{ANOTHER}{tmp_path}/them/first.py; this one is in {tmp_path}/us/second.py" in said
        assert "--force clean" in said
        assert "adopt" in said
        assert "@step(name=" in said
    bring_up(prefix, mine, shared=shared, force=("clean",))
    assert result(prefix, mine)["made_by"] == "us"
    assert planned(prefix, mine, shared).status == "hit"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("elsewhere/first.py", THEIRS),
        ("them/renamed.py", THEIRS),
        ("them/renamed.py", THEIRS.replace("> threshold", ">= threshold")),
        ("them/first.py", OURS),
    ],
    ids=["moved", "renamed", "renamed and edited", "written anew"],
)
def test_the_same_step_in_another_file_is_reused_with_a_warning(store, tmp_path, file, text):
    """Moved, renamed, edited: it is still this step; the file of a step may also change wholly."""
    mine = node(tmp_path / file, text)
    entry = planned(store, mine)
    assert entry.status == "hit"
    assert bool(entry.warnings) == (file != "elsewhere/first.py")
    assert bring_up(store, mine).executed == []


def test_another_step_in_a_file_of_the_same_name_is_refused(store, tmp_path):
    assert planned(store, node(tmp_path / "us" / "first.py", OURS)).status == "foreign"


def test_equal_inputs_under_another_key_bring_in_no_output_of_another_step(store, tmp_path):
    """Early cutoff finds outputs by what they were made from."""
    mine = node(tmp_path / "us" / "second.py", OURS, count=5)  # two shards of two, as of four
    assert planned(store, mine).status == "miss"
    bring_up(store, mine)
    assert result(store, mine)["made_by"] == "us"


def test_the_unfinished_build_of_another_step_is_refused(tmp_path):
    """Its shards would be built again; but whose output is it?"""
    store = str(tmp_path / "store")
    with pytest.raises(StepFailed, match="bad item"):
        bring_up(store, mapped(tmp_path / "them" / "first.py", 10, bad=(2,)))
    mine = load(tmp_path / "us" / "second.py", WORK).work()
    (warning,) = planned(store, mine).warnings
    assert f"{tmp_path}/them/first.py; this one is in {tmp_path}/us/second.py" in warning
    with pytest.raises(StepFailed, match=r"them/first\.py; this one is in .*us/second\.py"):
        bring_up(store, mine)
    bring_up(store, mine, force=("work",))
    assert result(store, mine)["made_by"] == "us"


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_the_output_of_another_step_can_be_adopted(store, tmp_path, own):
    mine = as_node(node(tmp_path / "us" / "second.py", OURS))
    places = Store(store) if own else Store(str(tmp_path / "mine"), (store,))
    seen = read_state([*mine.inputs.values(), mine], places)
    adopt(places, mine, seen, choose(places, mine, seen, None))
    assert plan([mine], places)[-1].status == "hit"


def test_an_output_of_an_earlier_version_is_refused_without_a_common_file(store, tmp_path):
    """It did not record which of its files the step is in."""
    mine = as_node(node(tmp_path / "us" / "second.py", OURS))
    path = storage.join(store, mine.directory)
    found = manifest.load(path)
    assert found is not None

    def recorded(sources: dict[str, list[str]]) -> str:
        old = msgspec.structs.replace(found, provenance={"sources": sources})
        storage.write_atomic(storage.join(path, manifest.NAME), old.to_bytes())
        return planned(store, mine).status

    assert recorded({"first.py": ["0", "1"]}) == "foreign"
    assert recorded({"first.py": ["0", "1"], "tests/pipeline/toy.py": ["0", "1"]}) == "hit"
    assert recorded({}) == "hit"


@pytest.mark.parametrize("old", ["steps/byte_tokenizer.py", "byte_tokenizer.py"])
def test_a_step_of_the_library_is_the_same_in_another_of_its_files(old):
    """An upgrade that moves it loses no output; a user's step of its name is another one."""
    node = as_node(steps.byte_tokenizer())
    defined = {"file": old, "folder": "/elsewhere", "statements": ["0123456789"]}
    there = other_step(node, {"sources": {old: ["a", "b"]}, "defined": defined})
    assert there == ("" if old.startswith("steps/") else "/elsewhere/byte_tokenizer.py")
    assert bool(other_step(node, {"sources": {old: ["a", "b"]}})) == (not old.startswith("steps/"))
