"""The step that fits a scaling law, and the ladder of runs for it; no model is trained."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import steps
from experiments.scaling_smoke import experiment
from models.shape.footprint import training_flops_per_token
from models.shape.presets import llama_200m, tiny
from pipeline import Hardware, InputError, Result, Runtime, StepContext, local, named, select, step
from pipeline.errors import StepFailed
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan import facts
from pipeline.store import storage
from steps.artifacts import Checkpoint, Report, Scores, Sequences
from steps.evaluation.evaluate import evaluate
from steps.exchange.import_hf import import_hf
from steps.pages.scaling import ladder, scaling
from steps.scaling_law.points import point_of
from steps.tokens.sequences import block_shuffle, mix
from steps.training.budget import resolved
from steps.training.continue_training import extend, warm_start
from steps.training.plan.declared_run import declared_run
from tests.pipeline.helpers import bring_up
from tests.steps.built import built
from tests.steps.synthetic import VOCAB, synthetic
from training.config import OptimizerConfig, TrainConfig
from training.config.train import MOST_STEPS

LENGTH = 16
TRAIN = TrainConfig(batch_size=4)
OPTIMIZER = OptimizerConfig()
SEQUENCES = block_shuffle(synthetic(), sequence_length=LENGTH)
MODELS = [
    dataclasses.replace(tiny, vocab_size=VOCAB, embed=width, mlp=3 * width)
    for width in (32, 64, 128, 192)
]
BUDGETS = (1e12, 5e12, 3e13)


@step(output=Checkpoint, version=1)
def as_trained(
    run: StepContext,
    sequences: Sequences,
    model: object,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    *,
    tokens: int,
    offset: float = 0.0,
    read: tuple[float, ...] = (),
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """What `train` says of itself, with a loss by a law of ours instead of training."""
    del run
    train = resolved(train, sequences, tokens=tokens)
    point = point_of("", model, train, math.nan)
    loss = 1.2 + 30 / point.parameters**0.3 + 90 / point.tokens**0.35 + offset
    rows = [{"step": train.steps, "split": name, "loss": loss} for name in ("validation", "code")]
    fields = {"model": dataclasses.asdict(model), "train": dataclasses.asdict(train)}
    return {**fields, "last": rows[0], "evaluations": rows, "epochs": read}


@step(output=Scores, version=1)
def as_scored(run: StepContext, checkpoint: Checkpoint) -> Result:
    """What `evaluate` says of a run of `as_trained`."""
    del run
    return {"rows": checkpoint.result["evaluations"]}


@step(output=Scores, version=1)
def as_followed(run: StepContext, model: Checkpoint) -> Result:
    """What `follow` says of it: rows of several steps."""
    del run
    rows = model.result["evaluations"]
    return {"rows": [*({**row, "step": 1, "loss": 9.0} for row in rows), *rows]}


def rung(model, tokens, **changes):
    return as_trained(SEQUENCES, model, OPTIMIZER, TRAIN, tokens=tokens, **changes)


def rungs(models=MODELS, flops=BUDGETS):
    return ladder(rung, models, flops=flops, length=LENGTH)


def warmed():
    train = dataclasses.replace(TRAIN, steps=4)
    return warm_start(rungs()[0], SEQUENCES, take="model", optimizer=OPTIMIZER, train=train)


def longer(run):
    return extend(run, SEQUENCES, optimizer=OPTIMIZER, train=dataclasses.replace(TRAIN, steps=9000))


published = partial(built, kind=Report)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    store = str(tmp_path_factory.mktemp("store"))
    return published(store, scaling(rungs(), budgets=(3e14,), resamples=20))


def test_the_law_of_a_ladder_is_the_one_its_losses_were_made_from(report):
    """With what a budget buys, how far that is from the runs, and every run's residual."""
    result = report.result
    found = {name: each["value"] for name, each in result["coefficients"].items()}
    assert found == pytest.approx(
        {"E": 1.2, "A": 30, "alpha": 0.3, "B": 90, "beta": 0.35}, rel=1e-3
    )
    assert result["split"] == "validation"
    assert result["why_compute"] == ""
    assert result["runs"][0]["name"].startswith("as_trained[")
    assert all(abs(run["residual"]) < 1e-6 for run in result["runs"])
    (bought,) = result["budgets"]
    assert bought["extrapolation"] == pytest.approx(10, rel=0.01)
    exact = 1.2 + 30 / bought["parameters"] ** 0.3 + 90 / bought["tokens"] ** 0.35
    assert bought["loss"]["value"] == pytest.approx(exact, rel=1e-4)
    assert bought["loss"]["low"] <= bought["loss"]["value"] * 1.0001


def test_the_page_has_the_law_the_budgets_and_both_charts(report):
    """As one HTML file."""
    text = storage.read_bytes(report.page).decode()
    assert text.count("<svg") == 2
    for words in (
        *("What budgets buy", "10 times the largest run", "Loss on validation by training FLOPs"),
        *("Loss on validation of each budget by size", "alpha", report.result["headline"][1]),
    ):
        assert words in text
    assert text.count("<td>as_trained[") == len(MODELS) * len(BUDGETS)


@pytest.mark.slow
def test_selected_runs_and_another_split_are_fitted(tmp_path):
    """The best of each rung, or its scores; runs at one ratio give a power law in compute."""

    def best(model, tokens):
        return select(
            tuple(
                named(rung(model, tokens, offset=offset), f"offset {offset}") for offset in (0, 0.5)
            ),
            by="last.loss",
        )

    runs = [
        each
        for model in MODELS
        for each in ladder(best, [model], flops=(120.0 * model.parameter_count**2,), length=LENGTH)
    ]
    runs[-2:] = as_followed(runs[-2]), as_scored(runs[-1])
    events = []
    wanted = scaling(tuple(runs), split="code", resamples=20)
    found = published(str(tmp_path), wanted, events=events)
    repeated, law = (each["message"] for each in events if each["event"] == "warning")
    assert "4 of 4 runs read their data more than 4 times" in repeated
    assert law.startswith("a power law in compute, since L(N, D) is not determined: 4 runs")
    assert found.result["split"] == "code"
    assert "L(N, D) needs 6" in found.result["why_compute"]
    assert [each["extrapolation"] for each in found.result["budgets"]] == [10, 100]
    text = storage.read_bytes(found.page).decode()
    assert text.count("<svg") == 1
    assert "a power law in compute" in text
    with pytest.raises(StepFailed, match="no loss on 'web'; it has validation, code"):
        bring_up(str(tmp_path), scaling(tuple(runs), split="web"))
    other = block_shuffle(synthetic(tokenizer="other"), sequence_length=LENGTH)
    runs[0] = as_trained(other, MODELS[0], OPTIMIZER, TRAIN, tokens=4_000)
    with pytest.raises(StepFailed, match="expected runs of one tokenizer, found 2"):
        bring_up(str(tmp_path), scaling(tuple(runs)))


def test_a_source_of_a_mixture_that_is_read_often_is_warned_of(tmp_path):
    """By the epochs that a run records of each source, and not by the size of all of them."""
    read = [(0.5, 1.0), (0.5, 1.0), (0.5, 10.0)]
    small = block_shuffle(synthetic(documents=20), sequence_length=LENGTH)
    both = mix((SEQUENCES, small), weights=(1.0, 1.0))
    runs = tuple(
        as_trained(both, MODELS[0], OPTIMIZER, TRAIN, tokens=4_000 * 4**n, read=read[n])
        for n in range(3)
    )
    events = []
    published(str(tmp_path), scaling(runs, resamples=20), events=events)
    repeated, _ = (each["message"] for each in events if each["event"] == "warning")
    assert "1 of 3 runs read their data more than 4 times, up to 10.0" in repeated


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 40),
    layers=st.integers(1, 12),
    length=st.integers(2, 300),
    batch=st.integers(1, 16),
    flops=st.floats(1e12, 1e20),
)
def test_a_rung_costs_what_was_asked_to_within_a_step(width, layers, length, batch, flops):
    """By the count that `plan` states; never more."""
    model = dataclasses.replace(MODELS[0], layers=layers, embed=16 * width, mlp=16 * width)
    train = TrainConfig(batch_size=batch)
    sequences = block_shuffle(synthetic(), sequence_length=length)
    one = batch * length * training_flops_per_token(model, length, causal=True)
    assume(flops / one < MOST_STEPS)

    def build(shape, tokens):
        return as_trained(sequences, shape, OPTIMIZER, train, tokens=tokens)

    (node,) = ladder(build, [model], flops=[flops], length=length)
    run = declared_run(as_node(node), {})
    asked = flops * (1 - 1e-12)  # of a float's rounding
    assert asked - one - one / batch < run.steps * one <= flops * (1 + 1e-12)


def test_batches_and_lengths_that_change_are_counted(tmp_path):
    """Against a sum over steps."""
    train = TrainConfig(
        steps=10,
        batch_size=4,
        sequence_length=16,
        batch_schedule=((3, 8),),
        length_schedule=((5, 2),),
    )
    point = point_of("", MODELS[0], train, 2.0)
    rows = [4] * 3 + [8] * 7
    pieces = [1] * 5 + [2] * 5
    assert point.tokens == 16 * sum(rows)
    assert point.flops == pytest.approx(
        sum(
            16 * r * training_flops_per_token(MODELS[0], 16 // p, causal=True)
            for r, p in zip(rows, pieces, strict=True)
        )
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: scaling(rungs()[:2]), r"scaling.runs: expected a number >= 3, found 2"),
        (lambda: scaling((synthetic(),) * 3), "expected runs of training, .* found 'synthetic'"),
        (lambda: scaling(rungs(), budgets=(0.0,)), "budgets: expected FLOPs above 0, got 0"),
        (lambda: scaling(rungs(), resamples=1), "resamples"),
        *(
            (lambda make=make: scaling((make(),) * 3), "begins with trained parameters")
            for make in (
                warmed,
                lambda: longer(warmed()),
                lambda: longer(import_hf("/model")),
                lambda: evaluate(longer(warmed())),
                lambda: select((rungs()[0], longer(warmed())), by="last.loss"),
            )
        ),
        (lambda: rungs(MODELS[:1] * 2), "two runs of 88.6k"),
        (lambda: rungs(flops=(10.0,)), "by 10 FLOPs are 0 tokens, .* sequence of 16"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(call, words):
    """Where the graph is declared."""
    with pytest.raises(InputError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_plan_says_which_law_the_runs_will_determine():
    """Before they are trained; and refuses runs that determine none."""

    def stated(**changes):
        node = as_node(scaling(rungs(**changes)))
        return facts.state([node], {})[node.key]

    found = stated()
    assert "L(N, D) of 12 runs, 4 sizes" in found.lines[0]
    assert found.data["flops"] == pytest.approx(4 * sum(BUDGETS), rel=1e-3)
    assert "power law in compute (1 model sizes" not in found.lines[0]
    assert "a power law in compute (3 runs" in stated(models=MODELS[:1]).lines[0]
    refused = stated(flops=BUDGETS[:1]).refusal
    assert "4 runs, L(N, D) needs 6; and a power law in compute needs runs of 3 budgets" in refused
    assert "\n" not in refused


def test_the_plan_counts_batches_that_change():
    """The FLOPs of a ladder are the budgets, also where the batch grows."""
    train = dataclasses.replace(TRAIN, batch_schedule=((200, 64),))

    def growing(model, tokens):
        return as_trained(SEQUENCES, model, OPTIMIZER, train, tokens=tokens)

    node = as_node(scaling(ladder(growing, MODELS, flops=BUDGETS, length=LENGTH)))
    found = facts.state([node], {})[node.key].data["flops"]
    assert found == pytest.approx(4 * sum(BUDGETS), rel=5e-3)


def test_scores_are_of_the_run_that_was_scored():
    """Declared: runs and scores can be mixed, and the law's runs are those behind them."""
    scored = [evaluate(run) for run in rungs()]
    node = as_node(scaling(tuple(scored)))
    assert all(each.output is Scores for each in node.inputs.values())
    assert "L(N, D) of 12 runs" in facts.state([node], {})[node.key].lines[0]


def test_every_preset_of_the_experiment_determines_a_law():
    """By the counts alone, before anything is trained."""
    for preset in experiment.presets:
        nodes = topological(experiment.graph(preset))
        (node,) = (each for each in nodes if each.step.name == "scaling")
        assert "L(N, D)" in facts.state([node], {})[node.key].lines[0]


def test_the_lines_of_the_documentation_declare_a_ladder():
    """In an experiment with sequences, a model, an optimizer, a configuration and hardware."""
    page = Path(__file__).parents[3] / "docs" / "scaling.md"
    (lines,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {"steps": steps, "replace": dataclasses.replace, "TransformerConfig": object}
    body = textwrap.indent(lines, "    ")
    exec(f"def graph(sequences, model, optimizer, training, length, on):\n{body}", names)
    node = as_node(names["graph"](SEQUENCES, llama_200m, OPTIMIZER, TRAIN, 4096, local()))
    results = {SEQUENCES.key: {"sequence_length": 4096}}
    assert (
        "L(N, D) of 12 runs, 4 sizes, 1.72e+18" in facts.state([node], results)[node.key].lines[0]
    )
