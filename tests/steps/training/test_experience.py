"""What a plan learns from the finished trainings of its store, and what a training records."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import steps
from pipeline import cli
from pipeline.graph.capacity import Capacity
from pipeline.graph.facts import Published
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.facts import state
from pipeline.plan.state import read_state
from pipeline.store.manifest import load as manifest_of
from pipeline.store.outputs import Store
from steps.artifacts import Checkpoint
from steps.checkpoints import finished
from steps.pages.predicted import predicted_table
from steps.training.measured_step import measured_step
from steps.training.plan import experience
from steps.training.plan.experience import STEP, Hardware, phase_of, predicted
from tests.steps.exchange.test_hf_chain import tokens_of
from tests.steps.mini import MINI
from training.cost.learned import CPUS
from training.cost.step_time import KINDS
from training.metrics.metrics_log import log_files, read_log

pytestmark = pytest.mark.slow  # the first of them trains

CPU = Hardware.of("cpu")
TPUCHAT = Path(__file__).parents[3] / "experiments" / "tpuchat_130m.py"


@pytest.fixture
def record(trained):
    return manifest_of(trained).result["measured"][STEP]


@pytest.fixture
def store(trained, tmp_path):
    """A store of trainings that are copies of one, each with its own measured step."""

    def made(*seconds, parts=None, **changes):
        for number, each in enumerate(seconds):
            directory = tmp_path / "store" / f"train-{len(changes)}{number:05d}"
            directory.mkdir(parents=True)
            tree = json.loads(Path(trained, "manifest.json").read_text())
            step = tree["result"]["measured"][STEP]
            step |= {"seconds": each, "disturbed": 0.2} | ({"parts": parts} if parts else {})
            step["hardware"] |= changes
            (directory / "manifest.json").write_text(json.dumps(tree))
        return str(tmp_path / "store")

    return made


def facts(store, *, learning=True, spot=False, **changes):
    """Of a training like the one in the store."""
    _, sequences = tokens_of(store)
    training = dataclasses.replace(MINI.training, **changes)
    more = {"epochs": 1, "sample_prompts": ("The",)}
    node = as_node(steps.train(sequences, MINI.model, MINI.optimizer, training, **more))
    seen = read_state(topological([node]), Store(store))
    published = Published(seen.found, store, Capacity(spot=spot), learning=learning)
    return state([node], published)[node.key]


def test_a_training_records_what_was_predicted_beside_what_it_measured(trained, record):
    """The median of its metrics rows; a plan before the first run has the table alone."""
    run = Checkpoint(trained, manifest_of(trained))
    rows = run.rows("history")
    took = np.median([row["seconds"] - row["data_wait"] for row in rows])
    assert record["seconds"] == pytest.approx(took)
    assert record["steps"] == len(rows) == 8
    ends = np.sort([row["seconds"] - row["data_wait"] for row in rows])[[0, -1]]  # of 8 steps
    assert record["disturbed"] == pytest.approx(math.log(ends[1] / ends[0]) / 2.5632)
    waited, spent = (sum(row[name] for row in rows) for name in ("data_wait", "seconds"))
    assert record["waiting"] == pytest.approx(waited / spent)
    (attempt,) = run.attempts
    assert record["compile_seconds"] == pytest.approx(attempt.buckets["compile"])
    saves = len(attempt.marks)
    assert record["save_seconds"] == pytest.approx(attempt.buckets["checkpoint"] / saves)
    assert "memory_bytes" not in record
    said = record["predicted"]
    assert (said["factor"], said["runs"]) == (1.0, 0)
    assert sum(said["times"].values()) == pytest.approx(said["seconds"][1])
    assert said["seconds"][1] == pytest.approx(said["table_seconds"])
    kinds = [each["kind"] for each in read_log(run.shard("record"))]
    assert STEP in kinds  # the rows of the steps are as they were


def test_a_save_on_other_devices_is_not_in_the_record(trained, record, tmp_path):
    """Of an attempt before, as of a run that was interrupted and resumed elsewhere."""
    run = Checkpoint(trained, manifest_of(trained))
    (last,) = run.attempts
    slow = {**last.buckets, "checkpoint": 100.0}
    before = dataclasses.replace(last, devices=last.devices + 1, buckets=slow)
    log = run.shard("record")
    done = {"hardware": record["hardware"], "history": [(log, log_files(log)[0][1])]}
    here = SimpleNamespace(keep=str(tmp_path), root=trained)
    found = measured_step(here, (run.model, MINI.optimizer, run.train), done, [before, last])
    assert found[STEP]["save_seconds"] == pytest.approx(record["save_seconds"])


def test_the_plan_of_a_store_without_runs_is_the_table(store, trained):
    phase = phase_of(Checkpoint(trained, manifest_of(trained)))
    found = predicted(phase, CPU, store())
    assert found.step == dataclasses.replace(found.table, times=found.step.times)
    assert found.step.seconds == pytest.approx(found.table.seconds)
    assert str(found) == "not corrected by runs on this CPU"


def test_runs_of_this_hardware_correct_the_plan_and_others_do_not(store, trained):
    """By hand for equal runs: their mean in logarithms, shrunk by the prior's share."""
    phase = phase_of(Checkpoint(trained, manifest_of(trained)))
    table = predicted(phase, CPU, "").table
    with_others = store(*[9.0] * 3, processor="another")
    assert predicted(phase, CPU, with_others).runs == 0
    store(*[9.0] * 2, cores=CPU.cores + 1, processor=CPU.processor)
    assert predicted(phase, CPU, with_others).correction.factor == 1.0
    times = [2 * table.seconds, 3 * table.seconds, 4 * table.seconds]
    found = predicted(phase, CPU, store(*times))
    shares = np.array(list(table.shares.values()))
    prior = CPUS.hardware**2 + CPUS.kind**2 * shares @ shares + CPUS.program**2
    shrunk = prior / (prior + (CPUS.noise**2 + 0.2**2) / 3)
    mean = math.log(24) / 3
    assert math.log(found.correction.factor) == pytest.approx(shrunk * mean)
    assert found.step.seconds == pytest.approx(found.correction.factor * table.seconds)
    left = prior * (1 - shrunk) + CPUS.noise**2
    assert found.correction.narrowed == pytest.approx(math.sqrt(left / (prior + CPUS.noise**2)))
    assert (found.runs, found.profiles) == (3, 0)


def test_the_table_of_hardware_is_corrected_as_the_plan_is(store, trained, capsys, monkeypatch):
    """Both of tpuchat on a v6e, slower than the prediction without the store's runs."""
    run = Checkpoint(trained, manifest_of(trained))
    v6e = {"platform": "tpu", "chip": "v6e", "limit": 2.0**34}
    record = run.result["measured"][STEP]["hardware"] | v6e
    chip = experience.resolved(run.model, MINI.optimizer, run.train, record)
    url = store(*[2 * predicted(chip, Hardware("v6e"), "").table.seconds] * 3, **v6e)

    def said(*words):
        command = ["plan", str(TPUCHAT), "train", "--prefix", url, "--json", *words]
        monkeypatch.setattr("sys.argv", ["ponente", *command])
        assert cli._command(command, {}) == 0
        return json.loads(capsys.readouterr().out)

    facts = said("--no-compile")["steps"][0]["facts"]
    found = said("--on", "v6e-1,v5p-8")
    rows = {row["hardware"]: row for row in found["rows"]}
    layouts = said("--on", "v6e-1")["rows"][0], said("--on", "v6e-1", "--no-learning")["rows"][0]
    assert found["learned"] == {"v6e": 3, "v5p": 0}
    assert layouts[0]["section"] == "as declared"
    assert layouts[0]["step_seconds"] == pytest.approx(facts["predicted"]["step_seconds"])
    assert rows["v6e-1"]["step_seconds"][1] <= layouts[0]["step_seconds"][1]
    assert layouts[0]["step_seconds"][1] > 1.05 * layouts[1]["step_seconds"][1]
    assert layouts[0]["hours"][1] > 1.05 * layouts[1]["hours"][1]
    slow = sum(facts["run"]["slow"].values()) / 3600
    assert layouts[0]["hours"][2] == pytest.approx(slow, rel=0.01)


def test_a_profile_on_a_chip_corrects_its_kinds_and_one_on_a_cpu_none(store, trained):
    """The head took ten times as long as in the table: its share of the corrected step grows."""
    run = Checkpoint(trained, manifest_of(trained))
    v6e = {"platform": "tpu", "chip": "v6e", "limit": 2.0**34}
    record = run.result["measured"][STEP]["hardware"] | v6e
    chip = experience.resolved(run.model, MINI.optimizer, run.train, record)
    table = predicted(chip, Hardware("v6e"), "").table
    url = store(table.seconds, table.seconds, parts={"head": 10 * table.times["head"]}, **v6e)
    found = predicted(chip, Hardware("v6e"), url)
    assert (found.runs, found.profiles) == (2, 2)
    kinds = found.correction.kinds
    assert max(kinds, key=kinds.get) == "head"
    assert found.step.shares["head"] > found.table.shares["head"]
    assert str(found).endswith("by 2 runs on v6e in this store, 2 of them with a profile")
    url = store(1.0, parts={"head": 1.0})
    assert predicted(phase_of(run), CPU, url).profiles == 0


def test_a_bounded_number_of_trainings_is_read_once(store, trained, monkeypatch):
    """However many a store has, and however many plans ask."""
    reads = []
    real = finished.readable
    monkeypatch.setattr(finished, "readable", lambda path: reads.append(path) or real(path))
    monkeypatch.setattr(finished, "_MOST", 4)
    phase = phase_of(Checkpoint(trained, manifest_of(trained)))
    url = store(*[1.0] * 6)
    assert [predicted(phase, CPU, url).runs for _ in range(2)] == [4, 4]
    assert len(reads) == 4


def test_damaged_and_older_records_say_nothing(store, trained):
    """Another version's fields, no time, no record: the others count."""
    url = store(0.0, math.inf, 1.0, 1.0, 1.0, 1.0)
    above = Path(url)
    for name, change in (
        ("train-000002", lambda step: step["hardware"].pop("cores")),
        ("train-000003", lambda step: step.clear()),
        ("train-000004", lambda step: step.update(steps=4)),
    ):
        path = above / name / "manifest.json"
        tree = json.loads(path.read_text())
        change(tree["result"]["measured"][STEP])
        path.write_text(json.dumps(tree))
    assert predicted(phase_of(Checkpoint(trained, manifest_of(trained))), CPU, url).runs == 1


@pytest.fixture
def copied(trained, tmp_path):
    """The URL of a store that has the training and its inputs."""
    url = str(tmp_path / "store")
    above, _, own = trained.rpartition("/")
    others = [n for n in os.listdir(above) if n.startswith(finished.EVERY) and n != own]
    shutil.copytree(above, url, ignore=lambda *_: others)  # other tests' runs are beside it
    return url


def test_a_damaged_training_says_nothing_of_starts_and_saves(copied, trained):
    """And refuses no plan of another one; of steps its manifest says what it said."""
    name = trained.rpartition("/")[2]
    run = Checkpoint(f"{copied}/{name}", manifest_of(f"{copied}/{name}"))
    sound = facts(copied, spot=True, steps=800)
    assert name in sound.data["spot"]["measured"]
    (log, _), *_ = log_files(run.shard("record"))
    lines = Path(log).read_text()
    row = '{"kind": "attempt", '
    for damaged in (lines.replace(row, row + "?"), lines.replace('"marks": [', '"marks": [7, ')):
        assert damaged != lines
        Path(log).write_text(damaged)
        found = facts(copied, spot=True, steps=800)
        assert (found.refusal, found.data["predicted"]) == ("", sound.data["predicted"])
        assert "spot" not in found.data
    Path(log).write_text(lines)
    damaged = json.loads(Path(run.path, "manifest.json").read_text())
    damaged["shards"] = [s for s in damaged["shards"] if not s["name"].startswith("checkpoint/")]
    moved = Path(copied, "train-moved")
    shutil.copytree(run.path, moved)
    (moved / "manifest.json").write_text(json.dumps(damaged))
    assert name in facts(copied, spot=True, steps=800).data["spot"]["measured"]


def test_the_plan_says_what_corrected_it(copied):
    """In its lines and in JSON; without learning it has the table, and hours by either."""
    url = copied
    found = facts(url, steps=800)
    said = found.data["predicted"]
    learned = said["learned"]
    assert (learned["runs"], learned["profiles"]) == (1, 0)
    middle = learned["factor"] * learned["step_seconds_without"][1]
    assert said["step_seconds"][1] == pytest.approx(middle)
    first, second = (line for line in found.lines if line.startswith(("predicted", "    ")))
    assert f"(middle {middle:.3g})" in first
    assert first.endswith(f"about {800 * middle / 3600:.2f} h of steps")
    assert (
        second.strip() == f"step time x{learned['factor']:.3g} by 1 run on this CPU in this store"
    )
    without = facts(url, learning=False, steps=800).data["predicted"]
    assert without["step_seconds"] == pytest.approx(learned["step_seconds_without"])
    assert without["learned"]["runs"] == 0


def test_the_report_shows_predicted_against_measured(record):
    """Of a profiled run on a chip, the kind that differs most is first."""
    head, step, *rows = predicted_table(record)
    assert head[1:] == ["predicted", "measured", "measured / predicted"]
    low, middle, high = record["predicted"]["seconds"]
    inside = "inside" if low <= record["seconds"] <= high else "outside"
    assert step[3] == f"{record['seconds'] / middle:.2f}, {inside} the interval"
    assert [row[0] for row in rows] == [
        "a save, waited for",
        "compilation, waited for",
        "wait for data, of the steps' time",
    ]
    times = dict.fromkeys(KINDS, 0.1)
    chip = {
        **record,
        "seconds": 0.9,
        "steps": 1200,
        "memory_bytes": 3 * 2**29,
        "parts": {"matmul": 0.11, "attention": 0.3},
        "predicted": {
            **{"seconds": [0.6, 0.7, 0.8], "factor": 0.934, "runs": 4, "times": times},
            **{"memory_bytes": 2**31, "save_seconds": 0.5},
        },
    }
    found = predicted_table(chip)
    assert found[1] == [
        "a step, median of 1,200",
        "0.7 s (0.6 to 0.8, x0.934 by 4 runs)",
        "0.9 s",
        "1.29, outside the interval",
    ]
    assert found[2] == ["... attention", "0.1 s", "0.3 s", "3.00"]
    assert found[3] == ["... matmul", "0.1 s", "0.11 s", "1.10"]
    assert found[4] == ["memory of a device, peak", "2.00 GiB", "1.50 GiB", "0.75"]
    assert predicted_table({}) == []
    unknown = predicted_table({**chip, "parts": {}, "predicted": {"memory_bytes": 0}})
    assert unknown[1][1] == "no row of this chip"
    assert experience.hardware_of({"platform": "gpu", "chip": ""}) == Hardware("?")
