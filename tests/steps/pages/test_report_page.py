"""Charts and pages from made-up runs: what there is to see is there, and nothing else."""

import dataclasses
import importlib
import json
import math
import re

import pytest

from pipeline.errors import InputError
from pipeline.pages.readable import duration
from pipeline.store.manifest import Manifest
from steps.artifacts import Scores
from steps.pages import charts, page
from steps.pages import curves as drawing
from steps.pages.run_record import TrainingRun
from training.metrics.goodput import AttemptTime, Mark, account

# Of the package, these names are the steps'.
compare = importlib.import_module("steps.pages.compare")
report = importlib.import_module("steps.pages.report")


def attempt(name, began, first, last, spent, *marks, outcome="running"):
    return AttemptTime(
        attempt=name,
        began=began,
        buckets=spent,
        first_step=first,
        last_step=last,
        marks=tuple(Mark(step, dict.fromkeys(["step"], at)) for step, at in marks),
        outcome=outcome,
        device="cpu",
        devices=1,
    )


ATTEMPTS = [
    attempt("a", 0.0, 0, 60, {"init": 5, "step": 60}, (50, 50.0)),
    attempt(
        "b",
        80.0,
        50,
        100,
        {"init": 5, "step": 50, "checkpoint": 2},
        (100, 57.0),
        outcome="finished",
    ),
]


def record(name="run", steps=100, scale=1.0, **changes):
    history = [
        {
            "step": step,
            "loss": scale * (2 + 3 / step),
            "grad_norm": 1 + 1 / step,
            "parameter_norm": 10.0,
            "learning_rate": 1e-3,
            "tokens": 250,
            "padded": 4.0,
            "skipped": 0.0,
            "seconds": 0.2,
            "data_wait": 0.01,
            "tokens_per_second": 1280.0,
            "tokens_per_second_average": 1270.0,
            "useful_tokens_per_second": 1250.0,
            "mfu": 0.4,
            "mfu_full": 0.45,
            "hfu": 0.5,
            "memory_bytes": 2**30,
        }
        for step in range(1, steps + 1)
    ]
    evaluations = [
        {"step": step, "loss": scale * value, "bits_per_byte": value / 3, **extra}
        for step, value in ((0, 5.0), (50, 2.2), (100, 2.1))
        for extra in ({}, {"split": "code"})
    ]
    fields = {
        "history": history,
        "evaluations": evaluations,
        "samples": [{"step": s, "prompt": "A <b>", "completion": f"at {s}"} for s in (50, 100)],
        "attempts": ATTEMPTS,
        "config": {"train": {"steps": steps, "seed": 0, "optimizer": {"learning_rate": scale}}},
        "entropy": 4.5,
    }
    return TrainingRun(name=name, **{**fields, **changes})


def scores(label, result, **config):
    """What the step `label` published."""
    said: dict = dict.fromkeys(("key", "step", "content", "action", "attempt", "build"), "")
    said |= {
        "alias": None,
        "sources": {},
        "version": 1,
        "inputs": {},
        "shards": (),
        "started": 0.0,
        "seconds": 1.0,
    }
    given = {"fields": config, "defaults": {}}
    manifest = Manifest(label=label, config=given, result=result, provenance={}, **said)
    return Scores("/store/scores", manifest)


def model():
    """What the cards read of a trained model."""
    result = {"first": {"loss": 5.0}, "last": {"loss": 2.0, "step": 100}, "unigram_entropy": 4.5}
    return scores("train", {**result, "measured": {"seconds": {"total": 9.0}}})


ROW = {"split": "web", "step": 60, "loss": 5.0, "bits_per_byte": 4.0, "tokens": 1890, "bytes": 3500}
QUESTIONS = {"items": 4, "chance": 0.5, "acc": 0.75, "acc_stderr": 0.25, "acc_bytes": 1.0}


def texts(chart):
    return re.findall(r">([^<>]+)</(?:text|span)>", chart)


def curves(chart):
    """What the script of the page reads, by label."""
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', chart)
    return {curve["label"]: curve for curve in json.loads(data)["curves"]}


def test_every_chart_of_a_run_says_what_it_shows():
    """Captions, units, legends of several curves and the restart; the data are the metrics."""
    run = record()
    captioned = dict(charts.training_charts(run, account(ATTEMPTS)))
    assert all(chart.count("<svg") == 1 for chart in captioned.values())
    drawn = curves(captioned["Loss"])
    assert drawn["training"]["x"] == [row["step"] for row in run.history]
    assert drawn["training"]["y"] == pytest.approx([row["loss"] for row in run.history], rel=1e-6)
    assert (drawn["code"]["x"], drawn["code"]["y"]) == ([0, 50, 100], [5, 2.2, 2.1])
    assert drawn["restart"]["x"] == [50]
    loss = texts(captioned["Loss"])
    for word in ("training", "validation", "code", "restart", "unigram entropy 4.50", "step"):
        assert word in loss
    assert "nats per token" in loss
    assert {"MFU, causal", "HFU", "MFU, full attention"} <= set(texts(captioned["Utilisation"]))
    assert "average of 50 steps" in texts(captioned["Throughput"])
    assert "GiB" in texts(captioned["Peak memory"])


def test_little_waiting_for_data_does_not_look_like_much():
    """The axis ends at five per cent or more."""
    for wait, top in ((0.0002, "5"), (0.06, "30")):
        run = record()
        run = record(history=[{**row, "data_wait": wait} for row in run.history])
        assert top in texts(dict(charts.training_charts(run, None))["Waiting for data"])


def test_configuration_and_samples_are_tables():
    """A row a setting as it is written, version and key last; the newest samples, then the rest."""
    names = "head figures splits tasks curves times attempts startups completions predicted memory"
    given: dict = {name: [] for name in (*names.split(), "data")} | {
        "title": "",
        "heading": "",
        "drawing": None,
    }
    rows = [{"step": step, "completion": f"at {step}"} for step in range(7, 0, -1)]
    config = {"train": {"steps": 1_234_567, "seed": None}, "version": 3, "key": "abc"}
    text = page.render("report", **given, samples={"A": rows}, configurations=[("train", config)])
    said = re.findall(r'<tr><th scope="row">(.*?)</th><td class="text">(.*?)</td></tr>', text)
    assert said == [
        *(("train.steps", "1234567"), ("train.seed", "None"), ("version", "3"), ("key", "abc"))
    ]
    assert "<pre>" not in text
    shown, rest = text.split("<summary>2 earlier</summary>")
    assert re.findall(r"at \d", shown) == [f"at {step}" for step in (7, 6, 5, 4, 3)]
    assert re.findall(r"at \d", rest) == ["at 2", "at 1"]


def test_what_was_not_recorded_has_no_chart():
    """An old record: losses and rates alone, no times, no samples."""
    plain = [
        {"step": s, "loss": 3.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 5.0}
        for s in (1, 2, 3)
    ]
    run = record(history=plain, evaluations=[], samples=[], attempts=[], entropy=None)
    shown = {caption for caption, svg in charts.training_charts(run, run.account()) if svg}
    assert shown == {*("Loss", "Learning rate", "Gradient norm, before clipping", "Throughput")}
    assert charts.time_charts(run.account()) == []


def test_an_empty_run_and_one_of_nan_can_be_drawn():
    """No rows, or a loss that is not a number: a page all the same."""
    for history in ([], [{"step": 1, "loss": math.nan}]):
        run = record(history=history, evaluations=[], entropy=None)
        assert dict(charts.training_charts(run, None))["Loss"] == ""


def test_the_waterfall_names_every_part_with_its_share():
    """Total first, then what was lost, steps last; small parts are not bars of nothing."""
    found = account(ATTEMPTS)
    said = texts(charts.time_charts(found)[0][1])
    assert "total" in said
    assert "lost: done again" in said
    assert "lost: dead time" in said
    assert "training steps" in said
    assert "evaluation" not in said
    share = f"{duration(found.parts['step'])}, {found.goodput:.1%}"
    assert share in [text.strip() for text in said]


def test_the_table_of_attempts():
    """What each ran on, did, lost, and how it ended."""
    head, first, second = report.attempts_table(account(ATTEMPTS))
    assert len(head) == len(first) == len(second)
    assert first[1:4] == ["1 x cpu", "1", "0 to 60"]
    assert first[5] == duration(65 - 50 + 15)
    assert first[-1] == "killed (no exit record)"
    assert second[5] == "nothing"
    assert second[-1] == "finished"


def test_the_table_of_starts():
    """Seconds to the first step by part; an attempt without a first step has no total."""
    spent = {"starting": 1.0, "importing": 2.5, "restoring": 4.0}
    whole = dataclasses.replace(
        ATTEMPTS[1], startup={**spent, "compiling": 0.5, "first step": 0.25}, loaded=True
    )
    found = account([dataclasses.replace(ATTEMPTS[0], startup=spent), whole])
    head, first, second = report.startup_table(found)
    assert len(head) == len(first) == len(second)
    assert first[:4] == ["a", "compiled", "1.0 s", "2.5 s"]
    assert first[-1] == ""
    assert second[:4] == ["b", "kept", "1.0 s", "2.5 s"]
    assert second[-1] == "8.2 s"
    assert len(report.startup_table(account(ATTEMPTS))) == 1


@pytest.mark.slow
def test_an_attempt_that_was_killed_while_it_compiled_did_no_steps():
    """No restart is drawn for it, and the table gives it no steps."""
    compiling = AttemptTime(attempt="m", began=66.0, buckets={"compile": 10.0})
    found = account([ATTEMPTS[0], compiling, ATTEMPTS[1]])
    assert [row[3] for row in report.attempts_table(found)[1:]] == ["0 to 60", "none", "50 to 100"]
    without = charts.training_charts(record(), account(ATTEMPTS))
    assert charts.training_charts(record(), found) == without


def shown(found, table):
    """The table's one row by its columns."""
    head, row = table(found)
    return dict(zip(head, row, strict=True))


@pytest.mark.parametrize(
    ("sequences", "what"), [(None, "whole held-out split"), (30, "1,890 tokens of web")]
)
def test_the_card_of_a_score_says_how_much_of_the_split_it_is_of(sequences, what):
    """A part of the split is not called the whole."""
    result = {"rows": [ROW], "samples": [], "tasks": [], "bits_per_byte": 4.0, "tokens": 1890}
    found = scores("evaluate", result, sequences=sequences)
    said = report.cards(model(), found, record(), None)
    assert ("4.000", f"bits per byte, {what}") in said
    assert shown(found, report.splits_table) == {
        **{"split": "web", "step": "60", "loss": "5.0000", "bits per byte": "4.0000"},
        **{"tokens": "1,890", "bytes": "3,500"},
    }


@pytest.mark.parametrize(("epochs", "of"), [([1.5], "corpus"), ([0.5, 3.0], "first source")])
def test_the_card_of_the_entropy_says_what_it_is_of(epochs, of):
    """A mixture's is that of its first source, as the validation loss is."""
    found = model()
    found.result["epochs"] = epochs
    figures = report.cards(found, None, record(), None)
    assert ("4.50", f"unigram entropy of the {of}, nats") in figures


@pytest.mark.parametrize(
    ("label", "result"),
    [
        ("multiple_choice", {**QUESTIONS, "headline": ["accuracy"]}),
        ("lm_evaluation", {"tasks": {"mine": QUESTIONS}, "measured": {"lm_eval": "1"}}),
        ("follow", {"tasks": [{"task": "mine", "step": n, **QUESTIONS} for n in (4, 8)]}),
    ],
)
def test_scores_of_questions_alone_have_a_table_and_no_card(label, result):
    """They have no loss; metrics are shown with their errors, those of the last checkpoint."""
    found = scores(label, result, sequences=None)
    assert not [what for _, what in report.cards(model(), found, record(), None) if "bits" in what]
    assert len(report.splits_table(found)) == 1
    row = shown(found, report.tasks_table)
    assert (row["acc"], row["acc bytes"], row["items"]) == ("0.750 ± 0.250", "1.000", "4")
    assert row["task"] == (label if label == "multiple_choice" else "mine")
    assert row.get("step") == ("8" if label == "follow" else None)
    assert found.rows == []


def test_what_a_scored_checkpoint_wrote_has_its_step():
    """As of a follower's, whose samples lie in its shards."""
    result = {"rows": [ROW], "samples": [{"prompt": "a", "completion": "b"}], "tasks": []}
    found = scores("evaluate", result, sequences=None)
    assert found.samples() == [{"step": 60, "prompt": "a", "completion": "b"}]
    assert report.tasks_table(found) == [[]]
    assert scores("multiple_choice", QUESTIONS).samples() == []


def test_a_small_models_memory_is_in_small_units():
    """GiB from half of one on."""
    assert report.memory_table({"a": 2.0**20, "b": 2.0**21})[0:2] == [
        ["part", "MiB"],
        ["a", "1.00"],
    ]
    assert report.memory_table({"a": 2.0**30})[0:2] == [["part", "GiB"], ["a", "1.00"]]


def test_means_leave_out_what_is_not_finite():
    """A running mean over a fiftieth around each point, by the plain definition."""
    values = [float(n % 7) for n in range(500)]
    values[100] = math.nan
    values[300] = math.inf
    found = drawing.smoothed(values)
    for index in (0, 5, 99, 100, 105, 305, 499):
        window = [v for v in values[max(0, index - 5) : index + 6] if math.isfinite(v)]
        assert found[index] == pytest.approx(sum(window) / len(window))


def test_long_curves_keep_their_peaks_and_stay_small():
    """A hundred thousand points become two thousand, spikes and ends of the range included."""
    y = [math.sin(n / 5000) + (50 if n == 77_777 else 0) for n in range(100_000)]
    y[5] = math.nan
    xs, ys = drawing.thinned(range(100_000), y)
    assert len(xs) == len(ys) <= drawing.MOST_POINTS
    assert xs == sorted(xs)
    assert max(ys) == y[77_777]
    assert xs[ys.index(max(ys))] == 77_777
    assert min(ys) == min(value for value in y if value == value)
    short = drawing.thinned([1, 2, 3], [4.0, math.nan, 6.0])
    assert short[0] == [1, 2, 3]
    assert math.isnan(short[1][1])


def test_runs_side_by_side():
    """Curves in one chart, the settings that differ and no others, and how each ended."""
    one, two = record("small rate"), record("large rate", scale=1.5, attempts=[])
    table = compare.differences([one, two])
    assert table == [
        ["setting", "small rate", "large rate"],
        ["train.optimizer.learning_rate", "1.0", "1.5"],
    ]
    head, *rows = compare.figures([one, two])
    assert head == ["figure", "small rate", "large rate"]
    by_name = {name: values for name, *values in rows}
    assert by_name["loss, validation"] == ["2.1000", "3.1500"]
    assert by_name["wall time, pauses included"] == [duration(one.account().total), "-"]
    assert by_name["goodput, pauses included"] == [f"{one.account().goodput:.1%}", "-"]
    text = compare.render([one, two])
    assert text.count("<svg") == len(["validation", "code", "training", *charts.PANELS])
    assert text.count('<div class="row"><span>') == 1  # of the run whose times are known
    assert text.count("<b>A &lt;b&gt;</b>") == 1
    written = text[text.index("<b>A &lt;b&gt;</b>") :]
    assert re.findall(r"<h4>(.*?)</h4>|(at \d+)", written) == [
        *(("small rate", ""), ("", "at 100"), ("", "at 50")),
        *(("large rate", ""), ("", "at 100"), ("", "at 50")),
    ]
    assert "Loss on code" in text
    assert re.findall(r'class="best" title="best">([^<]*)<', text)[:2] == ["2.0302", "2.1000"]
    assert not re.search(r'(src|href)="http', text)


def test_runs_need_names_of_their_own():
    """Two curves of one name cannot be told apart."""
    with pytest.raises(InputError, match="different names"):
        compare.render([record("a"), record("a")])
