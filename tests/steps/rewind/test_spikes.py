"""Steps that stood out, by the rule, and the poisoned documents behind them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from pipeline.errors import StepFailed
from steps.cli import rewind
from steps.pages.compare import record_of
from steps.rewind.batch import Batch, BatchRow, Rewinder
from steps.rewind.run import open_run
from steps.rewind.sights import trace
from steps.rewind.spikes import COLUMNS, spikes
from tests.steps.built import built
from tests.steps.rewind import kinds
from training.config import TrainConfig


def history(losses, norms=None):
    norms = [1.0] * len(losses) if norms is None else norms
    rows = zip(losses, norms, strict=True)
    return [{"step": n, "loss": a, "grad_norm": b} for n, (a, b) in enumerate(rows, 1)]


values = st.floats(0.5, 8.0)


@given(st.lists(values, min_size=1, max_size=150), st.lists(values, min_size=150, max_size=150))
def test_the_rule_is_the_one_that_is_written(losses, norms):
    """By NumPy, step by step, with the medians of the steps before that did not stand out."""
    rows, flagged = history(losses, norms[: len(losses)]), set()
    for column in COLUMNS:
        calm, rises, high = [], [], 0
        for row in rows:
            level = math.log(row[column])
            if len(calm) >= 8:
                rise, usual = level - np.median(calm[-8:]), np.array(rises[-64:])
                if len(usual) >= 16:
                    scale = 1.4826 * np.median(np.abs(usual - np.median(usual)))
                    high = high + 1 if (rise - np.median(usual)) / max(0.01, scale) >= 6 else 0
                    if 0 < high <= 8:
                        flagged.add(row["step"])
                        continue
                rises.append(rise)
            calm.append(level)
    firsts = [step for step in sorted(flagged) if step - 1 not in flagged]
    assert [each.step for each in spikes(rows, 1000)] == firsts


def test_a_lasting_rise_is_a_new_level_and_later_spikes_are_seen():
    """Of a loss that stays higher, logged every tenth step, the begin, and then what stands out."""
    losses = [3.0 + 0.01 * (n % 3) for n in range(60)] + [3.6 + 0.01 * (n % 3) for n in range(120)]
    losses[150] = 9.0
    rows = [{**row, "step": 10 * row["step"]} for row in history(losses)]
    assert [each.step for each in spikes(rows, 9)] == [610, 1510]


def test_a_batch_whose_row_is_not_finite_has_no_mean():
    """And that row is the worst."""
    common = {"part": "a", "epoch": 0, "documents": ()}
    rows = [
        BatchRow(row=n, loss=loss, counted=10, **common)
        for n, loss in enumerate((2.0, 4.0, None, 3.0))
    ]
    assert Batch(step=1, length=10, rows=rows).loss is None
    assert Batch(step=1, length=10, rows=rows).worst == 2
    assert Batch(step=1, length=10, rows=rows[:2]).loss == 3.0
    assert Batch(step=1, length=10, rows=rows[:2]).worst == 1
    assert Batch(step=1, length=10, rows=[]).worst is None


def test_what_is_not_finite_stands_out_and_a_fall_does_not():
    """NaN at once, also early; a loss that falls or is flat never."""
    falling = [9.0 * 0.97**n for n in range(100)]
    assert spikes(history(falling), 9) == []
    falling[5] = math.nan
    (only,) = spikes(history(falling), 9)
    assert (only.step, only.deviations) == (6, math.inf)


def test_of_a_long_spike_the_first_step_is_given():
    """With its end; the largest are kept and ordered by step."""
    losses = [2.0 + 0.01 * (n % 3) for n in range(120)]
    losses[60:63] = [4.0, 5.0, 3.0]
    losses[90], losses[100] = 2.5, 6.0
    found = spikes(history(losses), 2)
    assert [(each.step, each.last) for each in found] == [(61, 63), (101, 101)]


POISON = {"poison-a": 300, "poison-b": 500, "poison-c": 700}


@dataclasses.dataclass
class Poisoned:
    """A training on documents of words, three of which are random bytes; `path` of its output."""

    store: Path
    data: Any
    node: Any
    path: str


TRAIN = dataclasses.replace(
    kinds.TRAIN, steps=158, batch_size=8, checkpoint_every=10, keep_every=10
)
OPTIMIZER = dataclasses.replace(kinds.OPTIMIZER, learning_rate=1e-2)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("poison"), np.random.default_rng(0)
    rows = [{"id": f"doc-{n}", "text": kinds.text(n)} for n in range(900)]
    for name, at in POISON.items():
        letters = rng.integers(33, 127, 1200)
        rows.insert(at, {"id": name, "text": "".join(map(chr, letters))})
    (root / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = steps.tokenize(
        steps.sample(
            str(root / "documents.jsonl"), tokens=-1, splits=(("validation", 200),), seed=1
        ),
        steps.byte_tokenizer(),
    )
    data = steps.block_shuffle(cache, 64, io_block_size=16, window_blocks=1)
    node = steps.train(data, kinds.MODEL, OPTIMIZER, TRAIN)
    path = built(root / "store", node, steps.Checkpoint).path
    return Poisoned(root / "store", data, node, path)


def behind(path: str) -> dict[int, set[str | None]]:
    """The documents of the row with the highest loss, by step that stood out."""
    found = {}
    with Rewinder(open_run(path)) as rewinder:
        for spike in spikes(record_of(path, path).history, 9):
            row = max(rewinder.batch(spike.step).rows, key=lambda row: row.loss or 0.0)
            found[spike.step] = {each.origin.id for each in row.documents}
    return found


@pytest.mark.slow
def test_poisoned_documents_are_behind_the_spikes(poisoned):
    """Each of the three, as the row with the highest loss of a step that stood out."""
    found = behind(poisoned.path)
    assert set(POISON) <= set().union(*found.values()), found


@pytest.mark.slow
def test_the_same_training_without_them_has_no_spike(poisoned, tmp_path, capsys):
    """From the checkpoint before, by the declaration that the verb prints; the rest is equal."""
    (tmp_path / "ids.txt").write_text("poison-a\npoison-c\n\npoison-b\n")
    asked = [poisoned.path, "97", "--without", str(tmp_path / "ids.txt")]
    assert rewind.run([*asked, "--json"]) == 0
    names = {"steps": steps, "sequences": poisoned.data, "trained": poisoned.node}
    names |= {"optimizer": OPTIMIZER, "train": TRAIN}
    said = json.loads(capsys.readouterr().out)
    assert (said["at"], said["start"], said["end"]) == (90, 720, 158 * 8)
    exec(said["declaration"], names)
    output, fed = kinds.fed(poisoned.store, names["again"])
    before, after = (record_of(path, path).history for path in (poisoned.path, output.path))
    losses = [{row["step"]: row["loss"] for row in rows} for rows in (before, after)]
    with Rewinder(open_run(poisoned.path)) as with_them, Rewinder(open_run(output.path)) as rest:
        changed = []
        for step, batch in zip(range(91, 159), fed, strict=True):
            assert np.array_equal(rest.stored_ids(step), batch)
            same = (with_them.stored_ids(step) == batch).all(axis=1)
            shown = [
                any(str(each.origin.id).startswith("poison") for each in row.documents)
                for row in with_them.batch(step, losses=False).rows
            ]
            assert (same == ~np.array(shown)).all()
            changed += [step] * (not same.all())
            documents = rest.batch(step, losses=False).rows
            assert "poison" not in str([d.origin.id for row in documents for d in row.documents])
        for name in POISON:
            ((_, sights),) = trace(rest, name)
            assert all(each.step <= 90 for each in sights)
            assert sights
    first = min(changed)
    assert {s: v for s, v in losses[0].items() if s < first} == {
        s: v for s, v in losses[1].items() if s < first
    }
    assert {97, 98, 99} & {step for step in behind(poisoned.path)}
    assert not [step for step in behind(output.path) if step > 90]
    assert "with" in built(poisoned.store, names["page"], steps.Report).result["headline"][0]


@pytest.mark.slow
def test_what_cannot_be_left_out_is_refused(poisoned):
    """An id that no document has, more steps than asked for, and a checkpoint that has read it."""
    data = poisoned.data
    with pytest.raises(StepFailed, match="no training document is 'nothing'"):
        built(
            poisoned.store,
            steps.without(data, documents=("nothing",), start=0, end=9),
            steps.Sequences,
        )

    def extended(start: int, end: int, train: TrainConfig = TRAIN) -> Any:
        clean = steps.without(data, documents=("poison-b",), start=start, end=end)
        node = steps.extend(poisoned.node, clean, at=90, optimizer=OPTIMIZER, train=train)
        return built(poisoned.store, node, steps.Checkpoint)

    with pytest.raises(StepFailed, match="give `without` end=1264"):
        extended(720, 1000)
    with pytest.raises(StepFailed, match="give it the data"):
        extended(0, 1264)
