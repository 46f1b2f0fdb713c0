"""Scores of a checkpoint on any number of devices and processes, against NumPy over all rows."""

import dataclasses
import math

import jax
import pytest

from models.transformer import Transformer
from tests.training import tiny
from tests.training.evaluate.test_evaluator import oracle, stream
from tests.training.trainer.test_processes import run_processes
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restore import load_model
from training.config import Parallelism
from training.evaluate.checkpoint_scorer import Scorer, load_scored
from training.evaluate.evaluator import plan_sequences
from training.trainer.trainer import train

pytestmark = pytest.mark.slow  # whichever test comes first trains
FIGURES = ("loss", "bits_per_byte")
WORKER = "tests.training.evaluate.scoring_worker"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of the data, path of a checkpoint of the tiny run, its model on one device)."""
    root = str(tmp_path_factory.mktemp("trained"))
    tiny.write_data(root)
    done = train(tiny.make_job(root), devices=jax.devices()[:1])
    return root, done.checkpoint, load_model(done.checkpoint, tiny.MODEL)


@pytest.fixture(scope="module")
def wanted(trained):
    """The rows of each split by the reference model, every sequence of it."""
    root, _, model = trained
    found = []
    for name, shards in tiny.score_job(root).splits:
        ids = stream(shards)
        nll, tokens, size = oracle(model, ids, plan_sequences(len(ids), tiny.LENGTH))
        bits = nll.sum() / math.log(2) / size
        row = {"split": name, "loss": nll.sum() / tokens, "bits_per_byte": bits}
        found.append({**row, "tokens": tokens, "bytes": size})
    return found


def close(rows, wanted, tolerance):
    """Whether rows say the same, figures to a relative tolerance."""
    for got, want in zip(rows, wanted, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == (pytest.approx(value, rel=tolerance) if name in FIGURES else value)


@pytest.mark.parametrize(
    ("changes", "devices", "fits"),
    [
        ({}, 1, True),
        ({"microbatches": tiny.BATCH // 2}, 8, True),  # two sequences, rounded up to eight
        ({"parallel": Parallelism(tensor=2)}, 1, False),
        ({"parallel": tiny.split(8)}, 4, False),
    ],
    ids=["one", "more_than_a_microbatch_has", "tensor", "more_than_there_are"],
)
def test_whole_sets_on_any_number_of_devices(trained, wanted, caplog, changes, devices, fits):
    """Sums over all sequences; where training's parallelism does not fit, the log says so."""
    root, path, _ = trained
    job = tiny.score_job(root)
    changed = dataclasses.replace(job, train=dataclasses.replace(job.train, **changes))
    scorer = Scorer(changed, jax.devices()[:devices])
    close(scorer.score(scorer.load(path)).rows, wanted, 2e-6)
    scorer.close()
    assert (f"does not fit the {devices} devices here" in caplog.text) == (not fits)


def test_a_group_that_does_not_divide_the_model(trained, caplog):
    """All of six devices cannot share rows of 32 numbers, as two could."""
    _, path, _ = trained
    split = dataclasses.replace(tiny.TRAIN, parallel=Parallelism(sharding="fsdp"))
    load_scored(path, tiny.MODEL, split, tiny.EOS, batch_size=6, devices=jax.devices()[:6])
    assert "does not fit the 6 devices here" in caplog.text


def test_a_part_of_the_sets_is_the_same_in_the_loop_and_beside_it(trained):
    """What the training loop wrote down at its last step is what a scorer finds."""
    root, _, _ = trained
    job = tiny.make_job(
        root,
        train=dataclasses.replace(tiny.TRAIN, evaluate_batches=1),
        splits=tiny.score_job(root).splits,
        checkpoint_directory=f"{root}/part",
    )
    done = train(job, devices=jax.devices()[:1])
    last = [row for row in tiny.rows(done, "evaluations") if row["step"] == tiny.TRAIN.steps]
    assert [row["split"] for row in last] == ["validation", "other"]
    part = dataclasses.replace(tiny.score_job(root), sequences=tiny.BATCH)
    scorer = Scorer(part, jax.devices()[:1])
    rows = scorer.score(scorer.load(done.checkpoint)).rows
    close([{"step": tiny.TRAIN.steps, **row} for row in rows], last, 1e-6)


def test_two_processes_find_what_one_finds(trained, wanted):
    """Two processes of two devices, and one of four: the same rows, and the same answers."""
    root, path, _ = trained
    (one,) = run_processes(root, 1, 4, path, module=WORKER)
    both = run_processes(root, 2, 2, path, module=WORKER)
    assert both[0] == both[1]
    close(one["rows"], wanted, 2e-6)
    close(both[0]["rows"], wanted, 2e-6)


@pytest.mark.parametrize("what", ["index", "arrays", "disk"])
def test_a_store_that_fails_in_one_process_makes_all_read_again(tmp_path, what):
    """Each reads twice, process 0 keeps one score, nothing is skipped, and they end together."""
    saver = Checkpointer(str(tmp_path), attempt="a")
    path = saver.save(1, {"model": Transformer.init(tiny.MODEL, key=jax.random.key(0))}, {})
    saver.wait()
    reports = run_processes(str(tmp_path), 2, 1, path, what, module=WORKER)
    assert [report["loads"] for report in reports] == [2, 2]
    assert [report["kept"] for report in reports] == [[1], []]
    assert [report["skipped"] for report in reports] == [[], []]
    assert all(report["ended"] for report in reports)
