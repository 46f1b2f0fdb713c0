"""A step that was repaired is rebuilt: shards of other code are not those of the step as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from pipeline.store import storage
from tests.pipeline.code_versions import MAP, load, mapped
from tests.pipeline.helpers import (
    bring_up,
    check_invariants,
    ledgers,
    manifest_of,
    path_of,
    planned,
    result,
)

AGAIN = "2 of 4 shards were built by other code (work.py): built again"
KEPT = "2 of 4 shards were built by other code (work.py): kept (--keep-shards)"


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "code" / "work.py"


@pytest.fixture
def store(tmp_path, file) -> str:
    """A store with an unfinished build of the step: two of four shards, with a mistake in them."""
    prefix = str(tmp_path / "store")
    failed(prefix, mapped(file, 10, bad=(2,)))
    return prefix


def failed(store: str, node: Any, **choice: Any) -> list[str]:
    events: list[dict[str, Any]] = []
    with pytest.raises(StepFailed, match="bad item"):
        bring_up(store, node, events=events, **choice)
    return warnings(events)


def warned(store: str, node: Any, **choice: Any) -> list[str]:
    events: list[dict[str, Any]] = []
    bring_up(store, node, events=events, **choice)
    return warnings(events)


def warnings(events: list[dict[str, Any]]) -> list[str]:
    return [event["message"] for event in events if event["event"] == "warning"]


def test_shards_of_other_code_are_built_again(store, file):
    """Plan and run say which, and of what files; nothing of the mistake is published."""
    node = mapped(file, 100)
    assert planned(store, node).notes == [f"work: {AGAIN}"]
    assert planned(store, node).warnings == [], "--strict refuses what would be kept"
    assert warned(store, node) == [AGAIN]
    assert result(store, node)["values"] == [0, 100, 200, 300]
    assert "other_code" not in manifest_of(store, node).provenance
    assert planned(store, node).warnings == []
    check_invariants(store, finished=True)


def test_a_second_failure_after_the_repair_keeps_the_repaired_shards(store, file):
    """Each shard has the digest of the code that wrote it."""
    assert failed(store, mapped(file, 100, bad=(3,))) == [AGAIN]
    node = mapped(file, 100, bad=(3,), note="\n# a comment\n")
    assert planned(store, node).notes == []
    node = mapped(file, 1000)
    line = AGAIN.replace("2 of", "3 of")
    assert planned(store, node).notes == [f"work: {line}"]
    assert warned(store, node) == [line]
    assert result(store, node)["values"] == [0, 1000, 2000, 3000]


def test_comments_and_a_move_are_no_other_code(store, file):
    node = mapped(file, 10, bad=(2,), note='\n# repaired\n"""Text."""\n')
    assert planned(store, node).notes == []
    assert failed(store, node) == []
    assert failed(store, mapped(file.with_name("moved.py"), 10, bad=(2,))) == []


def test_shards_of_other_code_can_be_kept(store, file):
    """Then the output is mixed, and says so; --strict and verify refuse it."""
    node = mapped(file, 100)
    assert planned(store, node, keep_shards=True).warnings == [f"work: {KEPT}"]
    assert warned(store, node, keep_shards=True) == [KEPT]
    assert result(store, node)["values"] == [0, 10, 200, 300]
    kept = {"shards": 2, "of": 4, "files": "work.py"}
    assert manifest_of(store, node).provenance["other_code"] == {"kept": kept}
    (warning,) = planned(store, node).warnings
    assert "kept 2 of 4 shards, built by other code (work.py)" in warning


@pytest.mark.slow
def test_force_gives_up_an_unfinished_build_and_says_what(store, file):
    """Also one of the same code; and what --force has begun, --force resumes."""
    node = mapped(file, 10, bad=(3,))
    forced = frozenset({as_node(node).key})  # equal for all versions of the code
    line = "--force gives up an unfinished build: 2 of 4 shards finished"
    assert line in planned(store, node, forced=forced).detail
    assert failed(store, node, force=("work",)) == [line]
    (again,) = {ledger.build for ledger in ledgers(path_of(store, node))} - first(store, node)
    assert planned(store, node, forced=forced).detail.endswith("3 of 4 shards finished")
    node = mapped(file, 10, bad=(3,))
    assert failed(store, node, force=("work",)) == []
    assert failed(store, node) == [], "nor does a run without it go back"
    node = mapped(file, 10)
    bring_up(store, node)
    assert manifest_of(store, node).build == again
    check_invariants(store)


def first(store: str, node: Any) -> set[str]:
    """The build that was given up."""
    mine = ledgers(path_of(store, node))
    return {ledger.build for ledger in mine if "given-up-.force" in ledger.names()}


def test_force_resumes_what_it_began_with_nothing_to_give_up(tmp_path, file):
    """Two of three shards; a plan says so, too."""
    store, node = str(tmp_path / "store"), mapped(file, 10, bad=(2,))
    assert failed(store, node, force=("work",)) == []
    forced = frozenset({as_node(node).key})
    assert planned(store, node, forced=forced).detail.endswith("2 of 4 shards finished")
    assert "gives up" not in planned(store, node, forced=forced).detail
    assert failed(store, node, force=("work",)) == []
    assert first(store, node) == set()
    assert len(ledgers(path_of(store, node))) == 1


def test_force_after_a_repair_keeps_no_shard(store, file):
    """Straight after the failure, nothing is published."""
    node = mapped(file, 100)
    warned(store, node, force=("work",))
    assert result(store, node)["values"] == [0, 100, 200, 300]


def test_shards_of_an_earlier_version_are_kept_with_a_warning(store, file):
    """Their records have no code; an upgrade is no edit of the step."""
    node = mapped(file, 100)
    (ledger,) = ledgers(path_of(store, node))
    for name in ledger.names():
        url = Path(storage.join(ledger.directory, name))
        if name.endswith(".json"):
            tree = json.loads(url.read_text())
            del tree["code"]
            url.write_text(json.dumps(tree))
        elif name.endswith("-.code"):
            url.unlink()
    (line,) = planned(store, node).warnings
    assert "2 of 4 shards were built by an earlier version" in line
    assert line == f"work: {warned(store, node)[0]}"
    assert result(store, node)["values"] == [0, 10, 200, 300]


def typed(factor: int, bad: int | None, note: str = "") -> Any:
    """A node of a step that was typed into a notebook, in two cells."""
    space: dict[str, Any] = {"__name__": "__notebook__"}
    helper, step = MAP.format(factor="FACTOR", bad="BAD").split("@step")
    for cell in (f"{note}{helper}", f"FACTOR, BAD = {factor}, {(bad,)}", f"@step{step}"):
        exec(compile(cell, "<cell>", "exec"), space)
    return space["work"]()


def test_a_step_of_a_notebook_that_was_repaired_is_rebuilt(tmp_path):
    """It is in no file: its code and the values that it uses are compared as they were compiled."""
    store = str(tmp_path / "store")
    failed(store, typed(10, bad=2))
    assert failed(store, typed(10, bad=2, note="# a comment\n")) == []
    node = typed(100, bad=None)
    line = "2 of 4 shards were built by other code: built again"
    assert planned(store, node).notes == [f"work: {line}"]
    assert warned(store, node) == [line]
    assert result(store, node)["values"] == [0, 100, 200, 300]


TRAINING = '''
from tests.pipeline.toy import Numbers
from pipeline import Result, StepContext, step

RATE = {rate}

@step(output=Numbers, version=1)
def work(run: StepContext, *, steps: int = 4) -> Result:
    """Continues from its checkpoints."""
    if not run.finished("about"):
        with run.shard("about") as directory:
            pass
    earlier = run.claim("checkpoint/")
    for number in range(len(earlier), steps):
        if number == {stop}:
            raise ValueError("bad item")
        with run.shard(f"checkpoint/{{number}}", {{"progress": f"step {{number}}"}}) as directory:
            pass
    for name in earlier:
        run.declare(name)
    return {{"earlier": sorted(earlier), "rate": RATE}}
'''


def test_what_a_step_continues_from_is_never_dropped(tmp_path, file):
    """Checkpoints of other code are resumed, with one line that names the files."""
    store = str(tmp_path / "store")
    failed(store, load(file, TRAINING.format(rate=1, stop=2)).work())
    node = load(file, TRAINING.format(rate=2, stop=9)).work()
    line = "continues from what other code (work.py) wrote"
    assert planned(store, node).warnings == [f"work: {line}"]
    assert [said for said in warned(store, node) if "continues" in said] == [line]
    assert result(store, node)["earlier"] == ["checkpoint/0", "checkpoint/1"]
    continued = {"shards": 2, "of": 5, "files": "work.py"}
    assert manifest_of(store, node).provenance["other_code"] == {"continued": continued}
    check_invariants(store, finished=True)
