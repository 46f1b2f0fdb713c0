"""`ponente compare` on directories of runs, whole and in the middle of training."""

from __future__ import annotations

import dataclasses
import importlib
import json

import numpy as np
import pytest

from pipeline import InputError
from pipeline.pages.readable import flat
from steps.pages.run_record import of_directory
from training.config import TrainConfig
from training.metrics.differences import SequenceLosses

compare = importlib.import_module("steps.pages.compare")  # of the package, the name is the step's


def lines(path, entries):
    """A `metrics.jsonl` in the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"time": 0, **each}) + "\n" for each in entries)
    (path / "metrics.jsonl").write_text(text)


def steps(*numbers, loss=1.0):
    return [{"kind": "step", "step": n, "loss": loss * n, "tokens": 10} for n in numbers]


def test_the_verb_writes_the_page_of_two_runs(tmp_path, capsys):
    """It prints where the page is; of what is no run it says so in a line, and writes none."""
    lines(tmp_path / "one", steps(1, 2))
    lines(tmp_path / "two", steps(1, 2, 3))
    page = tmp_path / "page.html"
    runs = [f"a={tmp_path / 'one'}", f"b={tmp_path / 'two'}"]
    assert compare.main([*runs, "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"page: {page}\n"
    assert "<th>a</th><th>b</th>" in page.read_text()
    page.unlink()
    (tmp_path / "file").write_text("")
    for found in (tmp_path, tmp_path / "file"):
        with pytest.raises(InputError, match=f"^{found}: expected .*$"):
            compare.main([f"a={found}", "--output", str(page)])
    assert not page.exists()


def attempt(step, name, entries, *, build="g", began=0.0, last=0, **config):
    """An attempt at the train step in `step`: what it says of itself and of its time."""
    hardware = {"device": "cpu", "devices": 1, "processes": 1}
    first = {"kind": "config", "attempt": name, "build": build, **hardware, **config}
    times = {"kind": "time", "step": last, "buckets": {"step": 4.0}, "startup": {}}
    rows = [first, *entries, {**times, "time": began + 4.0}]
    lines(step / "attempts" / name / "keep", rows)


def began(step):
    return {"kind": "began", "step": step}


@pytest.fixture
def unfinished(tmp_path):
    """Two builds of a step; the newest has three attempts, of which the second never began."""
    step = tmp_path / "train-0123"
    attempt(step, "000001-z", [began(0), *steps(1, 2, loss=7)], build="old", last=2)
    train = TrainConfig(steps=6, batch_size=2, sequence_length=8)
    config = {"train": dataclasses.asdict(train)}
    scored = {"kind": "evaluation", "step": 3, "split": "validation", "loss": 2.0}
    first = [began(0), *steps(1, 2, 3), scored, *steps(4, 5)]
    attempt(step, "000002-y", first, began=10.0, last=5, **config)
    attempt(step, "000003-x", [], began=20.0, **config)
    third = [began(3), *steps(4, loss=9)]
    attempt(step, "000004-w", third, began=16.0, last=4, **config)
    return step


def test_an_unfinished_step_is_all_its_attempts(unfinished):
    """What was done again counts once, and time and goodput are those of the whole run."""
    found = of_directory(str(unfinished), "live")
    assert [(row["step"], row["loss"]) for row in found.history] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 36),
    ]
    assert [row["loss"] for row in found.evaluations] == [2.0]
    assert [each.attempt for each in found.attempts] == ["000002-y", "000003-x", "000004-w"]
    figures = dict(row for row in compare.figures([found])[1:])
    assert figures["tokens in the loss"] == "40"
    assert {f"{name}, pauses included" for name in ("wall time", "goodput")} <= figures.keys()


def test_an_evaluation_that_was_made_again_at_the_step_an_attempt_began_with_counts_once(tmp_path):
    """Told to stop at a step to evaluate, an attempt saves it and leaves the rest to the next."""
    step = tmp_path / "train-0123"
    names = ("validation", "other")
    for number, loss in enumerate((2.0, 3.0), 2):
        again = [{"kind": "evaluation", "step": 4, "split": n, "loss": loss} for n in names]
        attempt(step, f"00000{number}-x", [began(4), *again, *steps(5)], last=5)
    found = of_directory(str(step), "live")
    assert [(r["step"], r["split"], r["loss"]) for r in found.evaluations] == [
        (4, "validation", 3.0),
        (4, "other", 3.0),
    ]


def test_an_attempts_directory_is_the_run_up_to_its_end(unfinished):
    """With those before it and none after, of its own build of the step."""
    for name, losses in (("000004-w", [1, 2, 3, 36]), ("000002-y", [1, 2, 3, 4, 5])):
        found = of_directory(str(unfinished / "attempts" / name), name)
        assert [row["loss"] for row in found.history] == losses
    old = of_directory(str(unfinished / "attempts" / "000001-z"), "old")
    assert [row["loss"] for row in old.history] == [7, 14]
    assert [each.attempt for each in old.attempts] == ["000001-z"]


def test_settings_of_an_unfinished_run_are_what_identifies_it(unfinished):
    """In the shape of a manifest; what it does not say of itself does not count as different."""
    found = of_directory(str(unfinished), "live")
    settings = flat(found.config)
    assert settings["train.steps"] == 6
    assert "train.checkpoint_every" not in settings
    whole = dataclasses.replace(
        found, name="whole", partial=False, config={**found.config, "sample": {"tokens": 5}}
    )
    assert compare.differences([found, whole]) == [["setting", "live", "whole"]]
    other = dataclasses.replace(whole, name="other", config={**whole.config, "sample": {}})
    assert compare.differences([found, whole, other])[1:] == [["sample.tokens", "-", "5", "-"]]


def scored_run(path, loss, nll=None):
    """A run of two splits, with the losses by sequence of validation if they are given."""
    rows = [{"step": 2, "split": split, "loss": loss} for split in ("validation", "web")]
    entries = [{"kind": "evaluation", **row} for row in rows]
    if nll is not None:
        row = SequenceLosses.row("text", np.float32(nll), np.full(len(nll), 10))
        entries.append({"kind": "sequences", "step": 2, "split": "validation", **row})
    lines(path, [*steps(1, 2), *entries])
    return compare.record_named(f"{path.name}={path}")


def test_differences_of_losses_have_standard_errors_where_sequences_are_known(tmp_path):
    """Paired on validation; an older run and the other split say why there is none."""
    nll = np.random.default_rng(0).normal(30, 5, (2, 40))
    runs = [
        scored_run(tmp_path / "a", nll[0].mean() / 10, nll[0]),
        scored_run(tmp_path / "b", nll[1].mean() / 10, nll[1]),
        scored_run(tmp_path / "old", 9.0),
    ]
    best = int(nll[1].mean() < nll[0].mean())
    pairs = (nll[1 - best] - nll[best]) / 10
    name, other = "ba"[best], "ab"[best]
    error = pairs.std(ddof=1) / np.sqrt(40)
    assert pairs.mean() < 2.0227 * error
    found = compare.noise_table(runs)[1:]
    how = "paired over 40 sequences"
    first = ["validation", name, other, f"{pairs.mean():+.4f}", f"{error:.4f}", how]
    assert found[0] == [*first, "within noise"]
    assert found[1][1:3] == ["old", other]
    assert found[1][4:] == ["-", "not paired: old has no losses by sequence", ""]
    whys = [f"not paired: {run} has no losses by sequence" for run in (name, "old")]
    assert [row[5] for row in found[2:]] == whys
    page = compare.render(runs)
    assert "Differences of losses" in page
    assert how in page
    said = f"validation: within noise of {other}: {name} ({pairs.mean():+.4f} ± {error:.4f}, {how})"
    assert compare.within(runs) == [said]


def test_a_step_that_has_written_nothing_yet_is_refused(tmp_path):
    """Naming what is missing, as any other directory is."""
    lines(tmp_path / "train-4567" / "attempts" / "000001-a" / "keep", [])
    with pytest.raises(InputError, match=r"metrics\.jsonl that is not empty"):
        of_directory(str(tmp_path / "train-4567"), "x")


def test_a_name_ends_at_the_first_equals_sign(tmp_path, monkeypatch):
    """Directories are named after settings; one without a name is told by its slash."""
    lines(tmp_path / "lr=1e-3", steps(1))
    monkeypatch.chdir(tmp_path)
    for argument, name in (
        ("small=lr=1e-3", "small"),
        (f"small={tmp_path}/lr=1e-3", "small"),
        ("./lr=1e-3", "lr=1e-3"),
        (f"{tmp_path}/lr=1e-3", "lr=1e-3"),
    ):
        assert compare.record_named(argument).name == name
