"""A step that is repaired after a partial build: what is published is of the repaired code.

Each trial runs a step of some shards by command line, as a user does: the code has a mistake and
fails at a shard. It is repaired, in one of several ways (everything in the step's file, or in a
module that it imports, or not at all), and run again, with or without a flag. What is published
has the values of the repaired code, of both with `--keep-shards`, and the lines say so.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.store import storage
from pipeline.store.manifest import load
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.helpers import check_invariants, ledgers

ROOT = Path(__file__).parents[2]
STEP = '''
from pipeline import Artifact, Experiment, Result, StepContext, step
{imports}

class Values(Artifact):
    """A value a shard."""


def write(directory, item):
    {body}
    return {{"value": item * FACTOR}}


@step(output=Values, version=1)
def work(run: StepContext, *, count: int) -> Result:
    done = run.map(write, {{f"{{i:03d}}": i for i in range(count)}})
    return {{"values": [shard.result["value"] for shard in done.values()]}}


def graph(count: int = {count}) -> Values:
    return work(count=count)


experiment = Experiment(graph)
'''
FLAGS = ((), ("--keep-shards",), ("--force", "work"))
WAYS = ("in the step's file", "in a module that it imports", "in a comment only")


def _write(folder: Path, way: str, count: int, factor: int, bad: int | None, note: str) -> None:
    fails = "pass" if bad is None else f'if item == {bad}: raise ValueError("mistake")'
    imports, helper = f"FACTOR = {factor}", ""
    if way == "in a module that it imports":
        # Its failure is the environment's, so that the step's own file is not edited.
        imports, helper = f"from {folder.name}.helper import FACTOR", f"FACTOR = {factor}\n"
        fails = 'import os\n    if item == int(os.environ["BAD"]): raise ValueError("mistake")'
    elif way == "in a comment only":
        fails = 'import os\n    if item == int(os.environ["BAD"]): raise ValueError("mistake")'
    text = STEP.format(imports=imports, body=fails, count=count)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    (folder / "helper.py").write_text(helper)
    (folder / "exp.py").write_text(f"{text}# {note}\n")


def _run(folder: Path, store: str, executor: str, bad: int | None, *flags: str) -> tuple[int, str]:
    environment = {**os.environ, "BAD": str(-1 if bad is None else bad), "PYTHONPATH": str(ROOT)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    program = "import sys; from pipeline.cli import command; sys.argv[0] = 'ponente'; command()"
    arguments = ["run", str(folder / "exp.py"), "--prefix", store, "--executor", executor, *flags]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def _trial(executor: str, number: int, workspace: Path) -> str:
    draw = random.Random(number)
    kind = pick(number, len(FLAGS) * len(WAYS))
    flags, way = FLAGS[kind % len(FLAGS)], WAYS[kind // len(FLAGS)]
    where = f"{executor}, repaired {way}, {' '.join(flags) or 'no flag'}"
    store, folder = str(workspace / f"store-{number}"), workspace / f"code_{number}"
    count = draw.randrange(3, 7)
    bad = draw.randrange(1, count)
    old, new = draw.sample(range(2, 100), 2)
    _write(folder, way, count, old, bad, "first")
    status, said = _run(folder, store, executor, bad)
    assert status == 1, f"{where}: the mistake is found: {said}"
    assert "mistake" in said, said
    # On Ray, the mistake may end the step before another shard is finished.
    finished = _finished(store)
    assert finished or executor == "ray"
    edited = way != "in a comment only"
    _write(folder, way, count, new if edited else old, None, "repaired")
    status, said = _run(folder, store, executor, None, *flags)
    assert status == 0, f"{where}: {said}"
    values = _values(store)
    wanted = [(new if edited else old) * item for item in range(count)]
    kept = [got != want for got, want in zip(values, wanted, strict=True)]
    built = re.search(r"(\d+) of (\d+) shards were built by other code \((.*)\): (.*)", said)
    if "--keep-shards" in flags and edited:
        assert all(got in (old * i, new * i) for i, got in enumerate(values)), f"{where}: {values}"
        assert not kept[bad], f"{where}: {values}"
    else:
        assert values == wanted, f"{where}: {values}"
    if not edited:
        assert built is None, f"{where}: {said}"
    elif not finished:
        pass
    elif "--force" in flags:
        assert "--force gives up an unfinished build" in said, f"{where}: {said}"
    else:
        assert built is not None, f"{where}: {said}"
        assert int(built[2]) == count
        assert (folder.name + ("/helper.py" if "module" in way else "/exp.py")) in built[3]
        assert ("kept" in built[4]) == ("--keep-shards" in flags), f"{where}: {said}"
    check_invariants(store, finished=True)
    return "kept" if any(kept) else "of one code"


def _finished(store: str) -> int:
    (name,) = [n for n in storage.list_names(store) if n.startswith("work-")]
    return sum(ledger.count()[0] for ledger in ledgers(storage.join(store, name)))


def _values(store: str) -> list[int]:
    (name,) = [n for n in storage.list_names(store) if n.startswith("work-")]
    found = load(storage.join(store, name))
    assert found is not None
    return found.result["values"]


def _repaired(executor: str) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        seen = {"kept": 0, "of one code": 0}

        def trial(number: int) -> None:
            seen[_trial(executor, number, workspace)] += 1

        return {"trials": trials(seed, count, trial), **seen}

    return run


KINDS = len(FLAGS) * len(WAYS)
FAULTS = {
    58: [
        Fault("a step repaired after a partial build", 3, 10 * KINDS, _repaired("inline")),
        Fault("a step repaired after a partial build, on Ray", 1, KINDS, _repaired("ray")),
    ]
}
