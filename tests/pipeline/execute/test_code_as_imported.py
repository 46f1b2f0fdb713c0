"""The code that an output records is the code that built it, whatever its files say meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.graph.step import as_node
from pipeline.identity import source_code
from pipeline.plan.plan import code_warnings
from tests.pipeline.code_versions import load
from tests.pipeline.helpers import bring_up, manifest_of

TWO = '''
from pathlib import Path

from pipeline import Result, StepContext, step
from tests.pipeline.toy import Total

VALUE = "{value}"


@step(output=Total, version=1)
def first(run: StepContext, *, edits: str, text: str) -> Result:
    """Somebody edits a file while it runs."""
    Path(edits).write_text(text)
    return {{"value": VALUE}}


@step(output=Total, version=1)
def second(run: StepContext, one: Total) -> Result:
    """Runs after the edit."""
    {imports}
    return {{"value": VALUE, "late": late}}
'''


def test_an_edit_while_steps_run_is_no_code_of_theirs(tmp_path):
    """The second step was imported before the edit, and runs after it."""
    file, store = tmp_path / "two.py", str(tmp_path / "store")
    old, new = (TWO.format(value=value, imports="late = 0") for value in ("old", "new"))
    module = load(file, old)
    one = module.first(edits=str(file), text=new)
    two = module.second(one)
    bring_up(store, two)
    assert file.read_text() == new
    for node in (one, two):
        found = manifest_of(store, node)
        assert found.result["value"] == "old"
        assert code_warnings(as_node(node), found) == [
            f"{as_node(node).label}: code changed since this output was built: two.py"
        ]
    file.write_text(old)
    assert code_warnings(as_node(two), manifest_of(store, two)) == []


@pytest.mark.parametrize("edited", [False, True])
def test_a_file_that_a_body_imports_after_an_edit_is_recorded_as_it_was_used(
    tmp_path, monkeypatch, edited
):
    name = f"late_{edited}".lower()
    monkeypatch.syspath_prepend(tmp_path)
    helper, store = tmp_path / f"{name}.py", str(tmp_path / "store")
    helper.write_text("VALUE = 1\n")
    text = TWO.format(value="", imports=f"from {name} import VALUE as late")
    module = load(tmp_path / "lazy.py", text)
    other = "VALUE = 2  # two\n" if edited else "VALUE = 1  # the same\n"
    two = module.second(module.first(edits=str(helper), text=other))
    events: list[dict[str, Any]] = []
    bring_up(store, two, events=events)
    found = manifest_of(store, two)
    assert found.result["late"] == (2 if edited else 1)
    said = [event["message"] for event in events if event["event"] == "warning"]
    line = f"edited after the run began, and used as edited: {name}.py"
    assert said == ([line] if edited else [])
    assert code_warnings(as_node(two), found) == []


def test_a_module_that_is_loaded_again_counts_as_loaded_again(tmp_path):
    """A notebook that reloads an edited module runs the new code."""
    file = tmp_path / "again.py"
    texts = [TWO.format(value=value, imports="late = 0") for value in ("old", "new")]
    before, after = (
        source_code.digests(load(file, text).second.function)["again.py"] for text in texts
    )
    assert before != after
    Path(file).write_text("")
    step = load(file, texts[0]).second
    Path(file).write_text(texts[1])
    assert source_code.digests(step.function)["again.py"] == before


def test_equal_code_has_one_digest_wherever_it_lies():
    """What all files mean; not how they are called or laid out."""
    a, b = source_code.Digest("1", "x"), source_code.Digest("2", "y")
    digest = source_code.code_digest({"sources": {"a.py": a, "b.py": b}})
    moved = {"c.py": source_code.Digest("3", "y"), "a.py": a}
    assert source_code.code_digest({"sources": moved}) == digest
    assert source_code.code_digest({"sources": {"a.py": a}}) != digest
    assert source_code.code_digest({"sources": {}}) == ""


CELL = """
STEPS = 4
LIMITS = {"low": [0.5], "names": {"x", "y", "z"}}
plenty = {"unused": 1}

class Scale:
    by = 7

    def __call__(self, item, times=2):
        return item.plenty * times

def write(item, seed=3):
    return item in {"a", "b", "c"} or STEPS or LIMITS or Scale()(item)

def body(run):
    return write(run)
"""


def typed(seed: str, *texts: str) -> list[str]:
    """Digests of functions that are in no file, in a process with another hash seed."""
    program = (
        "from pipeline.identity.source_code import typed_digest\n"
        f"for text in {texts!r}:\n"
        "    space = {'__name__': '__main__'}\n"
        "    exec(text, space)\n"
        "    print(typed_digest(space['body']))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.check_output(
        [sys.executable, "-c", program], env=environment, text=True
    ).split()


@pytest.mark.slow
def test_a_function_in_no_file_is_compared_with_what_it_uses():
    """The same in every process; helpers, defaults and values that it uses count, no others."""
    [digest] = typed("0", CELL)
    changes = (
        "or STEPS>or -STEPS",
        "= 4>= 5",
        '"c">"d"',
        "[0.5]>[0.25]",
        "=3>=4",
        "=2>=3",
        "= 7>= 8",
    )
    other = f"# a comment{CELL}".replace('"unused": 1', '"unused": 2')
    changed = [CELL.replace(*change.split(">")) for change in changes]
    same, *different = typed("1", other, *changed)
    assert same == digest
    assert len({digest, *different}) == 1 + len(changes)
