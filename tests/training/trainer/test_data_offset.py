"""A run goes on only with the data, and at the place in it, where its checkpoint stands."""

import dataclasses

import jax
import pytest

from pipeline.errors import InputError
from tests.training import tiny
from training.trainer.initial_state import check_data_offset, data_offset
from training.trainer.trainer import train


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder, job of the run, its checkpoint of step 2)."""
    root = str(tmp_path_factory.mktemp("data"))
    tiny.write_data(root)
    job = tiny.make_job(root, train=dataclasses.replace(tiny.TRAIN, steps=2))
    return root, job, train(job, devices=jax.devices()[:1]).checkpoint


def _more(job, checkpoint, attempt, **changes):
    config = dataclasses.replace(job.train, steps=4, **changes)
    resume_from = ((2, checkpoint),)
    return dataclasses.replace(job, train=config, resume_from=resume_from, attempt=attempt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 16}, "16 sequences read.*32 sequences read"),
        ({"batch_schedule": ((1, 16),)}, "16 sequences read.*24 sequences read"),
    ],
)
def test_another_batch_is_refused_naming_both(stopped, changes, words):
    """The data offset of the checkpoint's step would be another."""
    _, job, checkpoint = stopped
    with pytest.raises(InputError, match=words):
        train(_more(job, checkpoint, min(changes), **changes), devices=jax.devices()[:1])


@pytest.mark.slow
def test_other_data_is_refused_and_moved_data_is_not(stopped, tmp_path):
    """Another seed or another shard is another order; another folder is not."""
    _, job, checkpoint = stopped
    source = job.data.sources[0]
    for change in ({"seed": 8}, {"shards": source.shards[:1]}, {"io_block_size": 2}):
        data = dataclasses.replace(job.data, sources=(dataclasses.replace(source, **change),))
        changed = dataclasses.replace(_more(job, checkpoint, min(change)), data=data)
        with pytest.raises(
            InputError, match=r"data order .* this run would continue with data order"
        ):
            train(changed, devices=jax.devices()[:1])
    moved = tuple(s._replace(directory="/elsewhere") for s in source.shards)
    data = dataclasses.replace(job.data, sources=(dataclasses.replace(source, shards=moved),))
    assert data_offset(data, job.train, 2) == data_offset(job.data, job.train, 2)


def test_another_length_of_sequences_is_refused():
    """The message has both lengths."""
    data = tiny.dataset()
    here = data_offset(data, tiny.TRAIN, 3)
    there = data_offset(dataclasses.replace(data, sequence_length=64), tiny.TRAIN, 3)
    with pytest.raises(InputError, match=r"sequences of 32 tokens.*sequences of 64 tokens"):
        check_data_offset(here, there, "somewhere")


def test_microbatches_and_lengths_of_pieces_do_not_move_the_place():
    """Rows read are counted before they are cut or grouped."""
    data = tiny.dataset()
    plain = data_offset(data, tiny.TRAIN, 3)
    cut = dataclasses.replace(tiny.TRAIN, length_schedule=((0, 4), (2, 2)), microbatches=2)
    assert data_offset(data, cut, 3) == plain
    assert plain["rows"] == 3 * tiny.BATCH
