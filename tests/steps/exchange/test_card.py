"""The cards of runs that are made up: averages, attempts, extensions and mixtures."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from pipeline import Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import Checkpoint, Sequences, TokenCache
from steps.exchange.card import write_cards
from steps.tokens.sequences import block_shuffle, mix
from tests.steps.built import built
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.config import TrainConfig
from training.metrics.goodput import AttemptTime
from training.metrics.metrics_log import NAME

STEPS = 9
TRAIN = dataclasses.replace(tiny.TRAIN, steps=STEPS)


@dataclasses.dataclass(frozen=True)
class Tried:
    """An attempt: Unix seconds of its start, its length, and its first step."""

    began: float
    seconds: float
    first_step: int = 0
    devices: int = 16


@step(output=Checkpoint, version=1)
def recorded(
    run: StepContext, sequences: Sequences, *, train: TrainConfig, attempts: tuple[Tried, ...]
) -> Result:
    """The record of a training on v6e-16 that was evaluated at its end."""
    evaluation = {"split": "validation", "step": STEPS, "loss": 1.25}
    rows = [{"kind": "evaluation", "time": 0.0, **evaluation}]
    for number, tried in enumerate(attempts):
        made = AttemptTime(
            attempt=str(number),
            began=tried.began,
            buckets={"step": tried.seconds},
            first_step=tried.first_step,
            last_step=STEPS,
            outcome="preempted",
            device="TPU v6 lite",
            devices=tried.devices,
        )
        rows.append({"kind": "attempt", **dataclasses.asdict(made)})
    with run.shard("record") as directory:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        storage.write_atomic(storage.join(directory, NAME), text.encode())
    return {
        "model": dataclasses.asdict(tiny.MODEL),
        "train": dataclasses.asdict(train),
        "last": evaluation,
        "measured": {"hardware": "v6e-16", "devices": "16 x TPU v6 lite"},
    }


ONE = (Tried(0.0, 3600.0),)


@pytest.fixture
def cards(tmp_path):
    """Writes and returns the two cards of a run."""

    def write(train=TRAIN, attempts=ONE, parameters="ema", sequences=None):
        data = sequences or block_shuffle(synthetic(), tiny.LENGTH)
        made = built(tmp_path, recorded(data, train=train, attempts=attempts), Checkpoint)
        written = {"architecture": "Qwen3", "dtype": "float32", "parameters": parameters}
        write_cards(str(tmp_path), made, written, "mine", "", (), None)
        return [(tmp_path / name).read_text() for name in ("README.md", "DATA.md")]

    return write


@pytest.mark.parametrize(
    ("settings", "parameters", "evaluated"),
    [
        ({"ema": 0.9}, "ema", True),
        ({"ema": 0.9}, "last", False),
        ({"average_last": 0.5}, "last", False),
        ({}, "last", True),
    ],
)
def test_losses_are_of_the_parameters_that_were_exported(cards, settings, parameters, evaluated):
    """A run that averages evaluates the average alone."""
    card, _ = cards(dataclasses.replace(TRAIN, **settings), parameters=parameters)
    assert ("| validation | 1.2500 |" in card) == evaluated
    assert ("## Evaluation" in card) == evaluated


@pytest.mark.parametrize(
    ("attempts", "rows"),
    [
        (ONE, {"wall time, pauses included": "1 h 00 min", "cost": "$43.20 on demand"}),
        (
            (Tried(0.0, 1800.0), Tried(90_000.0, 1800.0)),
            {"wall time, pauses included": "25 h 30 min", "cost": "$43.20 on demand"},
        ),
        ((Tried(0.0, 1800.0), Tried(1800.0, 1800.0, devices=8)), {"cost": None}),
        (
            (Tried(0.0, 3600.0, first_step=5),),
            {
                **{"steps": f"{STEPS}", "wall time, pauses included": None, "cost": None},
                "wall time of the last 4 steps, pauses included": "1 h 00 min",
                "cost of the last 4 steps": "$43.20 on demand",
                "hardware of the last 4 steps": "v6e-16",
            },
        ),
        ((), {"wall time, pauses included": None, "cost": None}),
    ],
)
def test_the_cost_is_of_the_time_that_machines_were_held(cards, attempts, rows):
    """Not of pauses, nor of two kinds of machines; an extension's is of its own steps."""
    card, _ = cards(attempts=attempts)
    found = dict(re.findall(r"^\| (.+?) \| (.+) \|$", card, re.MULTILINE))
    for name, value in rows.items():
        assert value is None or found[name].startswith(value)
        assert value is not None or name not in found


def test_the_data_of_a_mixture_are_those_of_all_its_sources(cards, tmp_path):
    """Train of every cache, and the held-out splits of the first, each with the cache's name."""
    kinds = synthetic(documents=60), synthetic(documents=80)
    parts = tuple(block_shuffle(cache, tiny.LENGTH) for cache in kinds)
    found = [built(tmp_path, cache, TokenCache) for cache in kinds]
    rows = [
        f"| train of {each.path.rpartition('/')[2]} | {each.tokens('train'):,} |" for each in found
    ]
    _, data = cards(sequences=mix(parts, weights=(1.0, 2.0)))
    assert "\n".join(rows) in data
    assert f"| train | {found[1].tokens('train'):,} |" in cards(sequences=parts[1])[1]
