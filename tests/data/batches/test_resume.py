"""A run that is stopped and started again, anywhere and on anything, sees the same batches."""

import itertools

import numpy as np
import pytest

from data.batches.dataset import Dataset
from data.batches.loader import Loader
from data.batches.mixture import MixturePhase
from tests.data.token_shards import source, spec, write_shards

STEPS = 200
PHASES = (MixturePhase(start=0, weights=(3.0, 1.0)), MixturePhase(start=333, weights=(1.0, 2.0)))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Two sources of 82 and 40 sequences of 32 tokens."""
    root = tmp_path_factory.mktemp("sources")
    web, _ = write_shards(root / "web", [1001, 49, 1600])
    code, _ = write_shards(root / "code", [500, 800], first=20_000)
    return web, code


@pytest.fixture(scope="module", params=["one source", "mixture"])
def dataset(request, stored):
    sources = [source(shards, f"source {number}") for number, shards in enumerate(stored)]
    one = request.param == "one source"
    made = spec(*sources[:1]) if one else spec(*sources, phases=PHASES, seed=5)
    with Dataset(made) as opened:
        yield opened


def batches(dataset, batch_size=4, **more):
    with Loader(dataset, batch_size=batch_size, **more) as loader:
        return np.array(list(loader))


def test_resuming_at_a_step_gives_what_follows(dataset):
    """The next four batches of some of 200 steps; every source's epochs end among them."""
    whole = batches(dataset, stop_batch=STEPS + 4)
    drawn = np.bincount(dataset.rows(np.arange(STEPS * 4)), minlength=dataset.sequences)
    assert drawn.min() > 2, "every source went through an epoch's end"
    for start in (*range(0, STEPS, 13), STEPS):
        tail = batches(dataset, start_batch=start, stop_batch=start + 4)
        assert np.array_equal(tail, whole[start : start + 4]), start


def by_processes(dataset, count, batch_size, start, stop):
    """Global batches put together from the parts of `count` processes."""
    parts = [
        batches(
            dataset,
            batch_size,
            rows=np.arange(batch_size).reshape(count, -1)[index],
            start_batch=start,
            stop_batch=stop,
        )
        for index in range(count)
    ]
    assert all(part.shape[1] == batch_size // count for part in parts)
    return np.concatenate(parts, axis=1)


@pytest.mark.slow
def test_a_run_that_changes_its_processes_again_and_again(dataset):
    """1, 8, 2, 4 and 1 processes one after the other: the batches of one process throughout."""
    counts, cuts = [1, 8, 2, 4, 1], [0, 3, 10, 11, 17, 30]
    parts = [
        by_processes(dataset, count, 16, *cut)
        for count, cut in zip(counts, itertools.pairwise(cuts), strict=True)
    ]
    assert np.array_equal(np.concatenate(parts), batches(dataset, 16, stop_batch=30))
