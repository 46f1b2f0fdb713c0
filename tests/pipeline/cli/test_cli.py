"""The verbs, as a user gives them: what they print, what they return, what they leave."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import sys
import time

import pytest

from pipeline import Experiment, InputError, Result, StepContext, named, step
from pipeline.graph.step import as_node
from pipeline.pages.record import runs
from pipeline.store import integrity, lease, storage
from pipeline.store.manifest import NAME, load
from tests.pipeline.cli.toy_experiment import EXPERIMENT, build
from tests.pipeline.toy import Numbers, clamp, noise, numbers, total


def _path(tmp_path, artifact):
    return str(tmp_path / "store" / as_node(artifact).directory)


def test_run_then_plan_then_run(ponente):
    """A run prints what differs from its preset and what it did; then all is up to date."""
    status, out, _ = ponente()
    assert status == 0
    assert out.startswith("build  preset full  store ")
    assert "count" not in out
    assert "  count = 11 (preset: 10)" in ponente("--count", "11", "--only", "numbers")[1]
    assert "4 steps executed, 0 reused" in out
    assert "total 180" in out
    status, out, _ = ponente("plan")
    assert [line.split()[:3] for line in out.splitlines()[1:-1]] == [
        ["reuse", name, "hit"] for name in ("numbers", "clamp", "scaled", "total")
    ]
    assert "all 4 steps up to date" in ponente()[1]
    assert "0 of 4 steps would run" in ponente("plan")[1]


def _settings(record):
    return {step.label: step.config["fields"] for step in record.steps.values()}


def test_the_record_of_a_run_names_its_experiment_its_code_and_its_end(ponente, tmp_path):
    """From the log that a run wrote, as its page and the reports of its outputs read it."""
    ponente()
    (built,) = runs(str(tmp_path / "store"))
    assert (built.name, built.outcome) == ("build", "ok")
    assert re.fullmatch("[0-9a-f]{40}", built.commit)
    assert {step.reason for step in built.steps.values()} == {"not built yet"}
    assert _settings(built)["clamp"] == {"limit": 100}
    assert _settings(built)["numbers"]["count"] == 10
    ponente("--refuses", "True", "--limit", "3")
    refused = runs(str(tmp_path / "store"))[0]
    assert refused.outcome == "failed"
    assert refused.name == "build"
    assert "expected something else" in refused.cause
    assert _settings(refused)["clamp"] == {"limit": 3}
    assert _settings(refused)["numbers"] == _settings(built)["numbers"]


def test_plan_gives_a_steps_advice_before_anything_runs(ponente):
    """What a step says of its configuration is a warning of `plan`, and only where it applies."""
    out = ponente("plan", "--limit", "0")[1]
    assert "warning: clamp: a limit of 0 makes every number 0" in out
    assert "4 of 4 steps would run" in out
    assert "warning" not in ponente("plan", "--limit", "1")[1]


def test_plan_names_the_field_that_changed(ponente, tmp_path):
    """The difference to the nearest earlier output, transitively, and what follows from it."""
    ponente()
    out = ponente("plan", "--limit", "5")[1]
    assert "limit: 100 -> 5" in out
    assert "input left, right changed (clamp: limit: 100 -> 5)" in out
    out = ponente("plan", "clamp", "--limit", "5")[1]
    assert f"nearest    {_path(tmp_path, clamp(numbers(count=10), limit=100))}" in out
    assert "limit: 100 -> 5" in out
    assert "then       total: runs, unless the same contents were read before" in out
    out = ponente("plan", "clamp", "--force", "clamp")[1]
    assert "then       total: reused unless the new content differs" in out


def test_a_failure_is_in_plan_status_and_logs(ponente):
    """After a failed run: cause and log in plan, the traceback in logs, the retry in the error."""
    status, _, err = ponente("--refuses", "True")
    assert status == 1
    assert "step refuse failed: expected something else" in err
    retry = next(x for x in err.splitlines() if "retry:" in x).partition("retry:")[2]
    assert os.path.abspath(shlex.split(retry)[0]) == os.path.abspath(sys.executable)
    line = next(x for x in ponente("plan", "--refuses", "True")[1].splitlines() if "refuse" in x)
    assert " failed " in line
    assert "log.txt" in line
    assert "InputError" in ponente("logs", "refuse", "--refuses", "True")[1]
    out = ponente("status", "--refuses", "True")[1]
    assert "last run: failed" in out
    assert "failed, " in next(x for x in out.splitlines() if x.startswith("run "))


def test_show_says_what_it_was_made_from_and_what_was_made_from_it(ponente, tmp_path):
    """Lineage in both directions, and the manifest itself as JSON."""
    ponente()
    out = ponente("show", "clamp")[1]
    source = _path(tmp_path, numbers(count=10))
    assert source in out
    assert as_node(build()).directory in out
    tree = json.loads(ponente("show", "clamp", "--json")[1])
    assert tree["key"] == as_node(clamp(numbers(count=10), limit=100)).key
    assert tree["config"] == {"limit": 100}
    status, _, err = ponente("show", "nothing")
    assert status == 1
    assert "expected one of numbers, clamp, scaled, total" in err


def test_verify_finds_a_changed_byte_and_force_repairs_it(ponente, tmp_path):
    """Same size, other content: a hit would not see it, verify does."""
    ponente()
    path = _path(tmp_path, numbers(count=10))
    url = storage.join(path, load(path).shards[0].root, "n.txt")
    storage.write_atomic(url, storage.read_bytes(url)[::-1])
    status, out, _ = ponente("verify")
    assert status == 1
    assert "4 outputs" in out
    assert "1 corrupt" in out
    assert re.search(r"^total +sound, 0 files; result in the manifest$", out, re.MULTILINE)
    assert f"{url}: bytes 0-" in out
    assert out.count("build it again with --force numbers") == 1
    ponente("--force", "numbers")
    assert ponente("verify")[0] == 0
    other = storage.join(_path(tmp_path, numbers(count=10)), NAME)
    storage.write_atomic(other, storage.read_bytes(other).replace(b'"key"', b'"kee"', 1))
    out = ponente("verify")[1]
    assert "move the directory away" in out
    assert "--force" not in out, "of another remedy than the problem's own"


@pytest.mark.slow
def test_gc_lists_then_deletes_what_no_experiment_reaches(ponente, tmp_path):
    """Every preset of the experiment and of the files named stays; the rest goes on request."""
    ponente()
    ponente("--preset", "wide")
    ponente("--count", "30")
    stray = _path(tmp_path, numbers(count=30))
    assert stray not in ponente("gc")[1], "a recorded run needs it"
    status, out, _ = ponente("gc", "--presets-only")
    assert status == 0
    line = next(line for line in out.splitlines() if stray in line)
    assert re.search(r"\(numbers: count: [12]0 -> 30; no preset", line), "what it was"
    assert _path(tmp_path, numbers(count=20)) not in out
    assert storage.exists(stray)
    plain = Experiment(build)
    other = tmp_path / "other_toy_experiment.py"
    other.write_text(EXPERIMENT)
    wide = _path(tmp_path, numbers(count=20))
    assert wide in ponente("gc", "--presets-only", experiment=plain)[1]
    assert wide not in ponente("gc", str(other), "--presets-only", experiment=plain)[1]
    for flags in (["--older-than", "1h"], ["--keep", "numbers,clamp,scaled,total"]):
        assert "0 objects" in ponente("gc", "--presets-only", *flags)[1]
    assert stray not in ponente("gc", "--presets-only", "--keep", stray.rpartition("/")[2])[1]
    assert "pass --yes to confirm" in ponente("gc", "--delete", "--presets-only")[2]
    ponente("gc", "--delete", "--presets-only", "--yes")
    assert not storage.exists(stray)
    assert "all 4 steps up to date" in ponente("--preset", "wide")[1]


def test_plan_of_only_some_steps_says_what_their_run_refuses(ponente):
    """An input is missing; then one is stale, which neither builds again."""
    status, out, err = ponente("--only", "clamp")
    assert status == 1
    problem = err.partition("missing inputs")[2].strip()
    out = ponente("plan", "--only", "clamp")[1]
    assert f"run would refuse: --only clamp: missing inputs{problem}" in out
    assert re.search("^refuse numbers", out, re.MULTILINE)
    ponente("--until", "clamp")
    assert re.search("^run +clamp", ponente("plan", "--only", "clamp", "--force", "clamp")[1], re.M)


def test_a_stale_input_is_planned_only_where_it_is_chosen(ponente, tmp_path):
    """`show` has the stale output, and says why it is not reused."""
    made = noise(numbers(count=4))
    experiment = Experiment(lambda: total(named(clamp(made, limit=9), "cut")))
    ponente(experiment=experiment)
    ponente("--only", "noise", "--force", "noise", experiment=experiment)
    lines = ponente("plan", "--only", "total", experiment=experiment)[1].splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["reuse", "numbers"],
        ["reuse", "noise"],
        ["skip", "cut"],
        ["reuse", "total"],
    ]
    status, out, _ = ponente("show", "cut", experiment=experiment)
    assert status == 0
    assert "state       stale: input numbers (noise) was built again" in out
    tree = json.loads(ponente("show", "cut", "--json", experiment=experiment)[1])
    assert (tree["state"], tree["label"]) == ("stale", "cut")


def test_verify_reads_the_outputs_of_a_shared_store(ponente, tmp_path):
    """As a plan reuses them; it says where they are."""
    ponente()
    (tmp_path / "store").rename(tmp_path / "team")
    flags = ("--shared", str(tmp_path / "team"))
    status, out, _ = ponente("verify", *flags)
    assert status == 0
    assert f"in the shared store: {tmp_path}/team/numbers-" in out
    assert ponente("verify")[0] == 1


def test_adopt_by_name(ponente, tmp_path):
    """An output is declared right for another setting; show says so, and a run reuses it."""
    ponente()
    source = as_node(clamp(numbers(count=10), limit=100)).directory
    status, _, err = ponente("adopt", "clamp", "--limit", "7")
    assert status == 1
    assert "pass --yes to confirm" in err
    status, out, _ = ponente("adopt", "clamp", "--from", source, "--limit", "7")
    assert status == 0
    assert "ignored difference: limit: 100 -> 7" in out
    assert "(adopted)" in ponente("show", "clamp", "--limit", "7")[1]
    assert "all 4 steps up to date" in ponente("--limit", "7")[1]


def test_graph_as_a_page(ponente, tmp_path):
    """One file with every step in it, which is a plan and no run without an end."""
    page = tmp_path / "graph.html"
    ponente("plan", "--html", str(page))
    text = page.read_text()
    assert all(label in text for label in ("numbers", "clamp", "scaled", "total"))
    assert "to build" in text
    assert not any(word in text for word in ("killed", "wall time", "previous"))


def test_json_of_the_verbs_that_inspect(ponente, tmp_path):
    """Fields that programs may rely on, with numbers as numbers."""
    ponente("--limit", "7")
    plan = json.loads(ponente("plan", "--json")[1])
    assert (plan["format"], plan["preset"]) == (1, "full")
    assert plan["store"] == str(tmp_path / "store")
    step = plan["steps"][1]
    assert step["label"] == "clamp"
    assert (step["action"], step["status"]) == ("run", "miss")
    assert step["changes"] == ["limit: 7 -> 100"]
    assert step["config"] == {"limit": 100}
    assert step["inputs"] == {"numbers": as_node(numbers(count=10)).key}
    explained = json.loads(ponente("plan", "clamp", "--json")[1])["steps"]
    assert [e["label"] for e in explained] == ["clamp"]
    assert any("limit: 7 -> 100" in line for line in explained[0]["explanation"])
    status = json.loads(ponente("status", "numbers", "--json")[1])
    assert [s["last_run"] for s in status["steps"]] == ["executed"]
    assert status["runs"][0]["outcome"] == "ok"
    status, text, _ = ponente("verify", "--json")
    verified = json.loads(text)
    assert (status, verified["missing"], verified["corrupt"]) == (1, 3, 0)
    assert {o["label"]: o["state"] for o in verified["outputs"]} == {
        **dict.fromkeys(("clamp", "scaled", "total"), "missing"),
        "numbers": "sound",
    }
    assert "missing: nothing was published" in ponente("verify")[1]
    assert ponente("verify", "numbers")[0] == 0
    garbage = json.loads(ponente("gc", "--presets-only", "--json")[1])
    assert len(garbage["objects"]) == 3
    assert garbage["bytes"] == sum(item["bytes"] for item in garbage["objects"])


@pytest.fixture
def laboratory(tmp_path, monkeypatch):
    """A package of a step and a module it imports inside its body, as a user would write them."""
    package = tmp_path / "laboratory"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("def value():\n    return 1\n")
    (package / "make.py").write_text(
        "from pipeline import Artifact, step\n"
        "@step(output=Artifact, version=1)\n"
        "def make(run):\n"
        "    from laboratory.deep import value\n"
        '    return {"value": value()}\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("laboratory.make"), package / "deep.py"
    for name in [n for n in sys.modules if n.startswith("laboratory")]:
        del sys.modules[name]


def test_code_that_changed_is_said_and_strict_refuses(ponente, laboratory, tmp_path):
    """An edit of an imported module is named; a comment is not a change; --strict is an error."""
    module, deep = laboratory

    experiment = Experiment(lambda: module.make())

    ponente(experiment=experiment)
    deep.write_text("# what it is worth\ndef value():\n    return 1\n")
    assert "warning" not in ponente("plan", experiment=experiment)[1]
    deep.write_text("def value():\n    return 22\n")
    for arguments in (["plan"], []):
        status, out, _ = ponente(*arguments, experiment=experiment)
        assert status == 0
        assert "make: code changed since this output was built: laboratory/deep.py" in out
        page = ["--html", str(tmp_path / "page.html")] if arguments else []
        status, _, err = ponente(*arguments, "--strict", *page, experiment=experiment)
        assert status == 1
        assert "--strict" in err
    err = ponente("plan", "--strict", "--on", "v6e-8", experiment=experiment)[2]
    assert "--strict: outputs were built by other code: make: code changed" in err


@step(output=Numbers, version=1)
def climb(run: StepContext, *, steps: int) -> Result:
    """Saves its state after every step, as training does, and is cut off after half of them."""
    for number in range(1, steps // 2 + 1):
        with run.shard(f"state/{number:03d}", {"progress": f"step {number} of {steps} saved"}) as d:
            storage.write_atomic(storage.join(d, "state"), b"1")
    raise InputError("cut off")


def test_plan_shows_what_the_last_shard_says_of_the_progress(ponente):
    """Where how many shards will come is not known: the step reached, in place of their number."""
    experiment = Experiment(lambda: climb(steps=20))
    assert ponente(experiment=experiment)[0] == 1
    line = ponente("plan", experiment=experiment)[1].splitlines()[1]
    assert "step 10 of 20 saved" in line
    assert "shards" not in line


def test_plan_says_how_far_a_step_got_and_who_runs_it(ponente, tmp_path, monkeypatch):
    """A fan-out that fails at its third shard: 2 of 5; then a live owner, with its process."""
    real, calls = integrity.measure, []

    def full(directory, path, size):
        calls.append(path)
        if len(calls) > 2:
            raise InputError("no room")
        return real(directory, path, size)

    experiment = Experiment(lambda: numbers(count=10, shards=5))

    monkeypatch.setattr(integrity, "measure", full)
    assert ponente(experiment=experiment)[0] == 1
    line = ponente("plan", experiment=experiment)[1].splitlines()[1]
    assert " failed " in line
    assert "no room" in line
    assert "2 of 5 shards finished" in line
    monkeypatch.undo()
    path = _path(tmp_path, numbers(count=10, shards=5))
    held = lease.acquire(path, published=lambda: False, waiting=lambda owner: None)
    assert held is not None
    line = ponente("plan", experiment=experiment)[1].splitlines()[1]
    assert " running " in line
    assert f"process {os.getpid()} on " in line
    assert ", since 20" in line
    assert "released, was held by process" in ponente("unlock", "numbers", experiment=experiment)[1]
    held.release()
    marks = tmp_path / "marks"
    monkeypatch.setenv("PONENTE_MARKS", str(marks))
    assert ponente(experiment=experiment)[0] == 0
    assert len(marks.read_text().split()) == 3, "two of five were finished before"


def test_plan_says_that_an_owner_elsewhere_does_not_respond(ponente, tmp_path):
    """A lease of another host without a sign of life for an hour: no step that is running."""
    record = storage.join(_path(tmp_path, numbers(count=10)), "leases", "000001.json")
    owner = {"host": "elsewhere b n", "pid": 7, "process_start": 1.0, "nonce": "0", "since": 1e9}
    storage.create(record, json.dumps(owner).encode())
    line = ponente("plan")[1].splitlines()[1]
    assert " running " in line
    assert "does not respond" not in line
    hour_ago = time.time() - 3600
    os.utime(record, (hour_ago, hour_ago))
    line = ponente("plan")[1].splitlines()[1]
    assert "owner does not respond: process 7 on elsewhere" in line
    assert "last heartbeat 3,6" in line
    assert " running " not in line
