"""Warm starts take what they say and nothing else; an extension is the longer run."""

import dataclasses

import pytest

from pipeline.errors import CorruptOutput, InputError
from tests.training import tiny
from training.checkpoint.restore import load_model, restore
from training.config.job import Start
from training.trainer.initial_state import check_data_offset, data_offset, restore_or_init

HEARD = tiny.Heard()
CONSTANT = dataclasses.replace(tiny.OPTIMIZER, schedule="constant")


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A finished run of four steps at a constant rate: (job, result)."""
    train = {"steps": 4, "checkpoint_every": 2}
    directory = str(tmp_path_factory.mktemp("finished"))
    job = tiny.make_job(data, train=train, optimizer=CONSTANT, checkpoint_directory=directory)
    return job, tiny.run(job)


def start_with(finished, take, **changes):
    program = tiny.program(**changes)
    job = dataclasses.replace(
        finished[0],
        train=dataclasses.replace(tiny.TRAIN, **changes),
        start=Start(checkpoint=finished[1].checkpoint, take=take),
    )
    return restore_or_init(job, program, HEARD), program


@pytest.mark.slow
def test_taking_the_model_leaves_the_optimizer_new(finished):
    """Parameters are the checkpoint's; moments, counts and step are those of a new run."""
    found, program = start_with(finished, "model")
    saved = restore(finished[1].checkpoint, program.abstract)
    assert tiny.equal(found.state.model, saved.model)
    assert tiny.equal(found.state.optimizer_state, program.init().optimizer_state)
    assert (int(found.state.step), found.step, found.history) == (0, 0, ())


@pytest.mark.slow
def test_taking_the_moments_takes_their_counts_too(finished):
    """Without its count Adam's bias correction would blow the first updates up."""
    found, program = start_with(finished, "moments", ema=0.5)
    saved = restore(finished[1].checkpoint, tiny.program().abstract)
    assert tiny.equal(found.state.model, saved.model)
    assert tiny.equal(found.state.optimizer_state, saved.optimizer_state)
    assert tiny.equal(found.state.ema, saved.model)
    assert (int(found.state.step), int(found.state.skipped)) == (0, 0)
    tokens = program.layout.place(tiny.random_tokens(0), tiny.BATCH)
    state, _ = program.step(found.state, tokens)  # the average is no alias of the model
    assert int(state.step) == 1


@pytest.mark.slow
def test_an_extended_run_is_the_longer_run(finished, tmp_path):
    """Four steps and four more have the bits, rows and evaluations of eight at once."""
    job, four = finished
    config = dataclasses.replace(job.train, steps=8)
    eight = tiny.run(job, train=config, checkpoint_directory=str(tmp_path / "eight"))
    more = dataclasses.replace(
        job,
        train=config,
        start=Start(checkpoint=four.checkpoint, take="everything"),
        checkpoint_directory=str(tmp_path / "more"),
    )
    extended = tiny.run(more)
    assert len(tiny.entries(more, "started_from")) == 1
    assert len(extended.history) == 1, "it needs no log of the run that it continues"
    assert tiny.learned(tiny.rows(extended)) == tiny.learned(tiny.rows(eight))
    assert extended.compilations == 1
    abstract = tiny.program(steps=8).abstract
    assert tiny.equal(*(restore(run.checkpoint, abstract) for run in (extended, eight)))
    assert tiny.rows(extended, "evaluations") == tiny.rows(eight, "evaluations")
    assert four.checkpoint != extended.checkpoint


@pytest.mark.slow
def test_an_extension_tells_when_its_schedule_disagrees_with_the_past(finished, tmp_path):
    """A constant rate continued as such says nothing; another peak names both rates."""
    told = {}
    for peak in (1e-2, 5e-3):
        job = dataclasses.replace(
            finished[0],
            train=dataclasses.replace(finished[0].train, steps=5),
            optimizer=dataclasses.replace(CONSTANT, learning_rate=peak),
            start=Start(checkpoint=finished[1].checkpoint, take="everything"),
            checkpoint_directory=str(tmp_path / str(peak)),
        )
        tiny.run(job)
        told[peak] = [each["reason"] for each in tiny.entries(job, "learning_rate")]
    assert told[1e-2] == []
    assert "step 4 was done at the learning rate 0.01" in told[5e-3][0]
    assert "has 0.005" in told[5e-3][0]


@pytest.mark.slow
def test_what_is_exported_of_a_run_with_an_average_is_the_average(finished, tmp_path):
    """Loading the model of its checkpoint gives the average's bits, and evaluations are of it."""
    job = finished[0]
    config = dataclasses.replace(job.train, ema=0.5)
    found = tiny.run(job, train=config, checkpoint_directory=str(tmp_path))
    state = restore(found.checkpoint, tiny.program(steps=4, ema=0.5).abstract)
    loaded = load_model(found.checkpoint, tiny.MODEL)
    assert tiny.equal(loaded, state.ema)
    assert not tiny.equal(loaded, state.model)
    for row, without in zip(tiny.rows(found), tiny.rows(finished[1]), strict=True):
        assert tiny.learned([row])[0] == pytest.approx(tiny.learned([without])[0], rel=1e-6)
    last, other = (tiny.rows(run, "evaluations")[-1]["loss"] for run in (found, finished[1]))
    assert last != other


@pytest.mark.slow
@pytest.mark.parametrize("take", ["model", "moments"])
def test_a_new_run_starts_from_the_model_that_was_published(finished, tmp_path, take):
    """Where the checkpoint has an EMA, it is the model that `load_model` and exports give."""
    config = dataclasses.replace(finished[0].train, ema=0.5)
    averaged = tiny.run(finished[0], train=config, checkpoint_directory=str(tmp_path))
    begun = tiny.rows(averaged, "evaluations")[-1]["loss"]
    start = Start(checkpoint=averaged.checkpoint, take=take)
    found = restore_or_init(
        dataclasses.replace(finished[0], start=start), tiny.program(steps=4), HEARD
    )
    assert tiny.equal(found.state.model, load_model(averaged.checkpoint, tiny.MODEL))
    again = tiny.run(finished[0], start=start, checkpoint_directory=str(tmp_path / "again"))
    rows = tiny.rows(again, "evaluations")
    assert rows[0]["loss"] == pytest.approx(begun, abs=1e-6)


@pytest.mark.slow
def test_a_start_that_cannot_be_is_refused(finished, tmp_path):
    """No more steps, another model, a checkpoint that is gone, an unknown word."""
    job, four = finished
    job = dataclasses.replace(job, checkpoint_directory=str(tmp_path))
    everything = Start(checkpoint=four.checkpoint, take="everything")
    with pytest.raises(InputError, match=r"has done 4 steps and TrainConfig\.steps is 4"):
        tiny.run(job, start=everything)
    wide = dataclasses.replace(job, model=dataclasses.replace(tiny.MODEL, mlp=96))
    start = Start(checkpoint=four.checkpoint, take="model")
    with pytest.raises(InputError, match="of another model"):
        tiny.run(wide, start=start, attempt="1")
    gone = Start(checkpoint=str(tmp_path / "gone"), take="model")
    with pytest.raises(CorruptOutput, match="gone"):
        tiny.run(job, start=gone, attempt="2")
    with pytest.raises(InputError, match=r"Start\.take"):
        Start(checkpoint="x", take="weights")


@pytest.mark.slow
def test_a_run_with_checkpoints_of_its_own_resumes_and_does_not_start_again(finished):
    """Once begun, where it started from no longer matters."""
    job, four = finished
    start = Start(checkpoint="/nowhere", take="model")
    own = dataclasses.replace(job, resume_from=((4, four.checkpoint),), start=start)
    assert restore_or_init(own, tiny.program(steps=4), HEARD).step == 4


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """(job of the run, its checkpoint of step 2)."""
    directory = str(tmp_path_factory.mktemp("stopped"))
    job = tiny.make_job(data, train={"steps": 2}, checkpoint_directory=directory)
    return job, tiny.run(job).checkpoint


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
    job, checkpoint = stopped
    with pytest.raises(InputError, match=words):
        tiny.run(_more(job, checkpoint, min(changes), **changes))


@pytest.mark.slow
def test_other_data_is_refused_and_moved_data_is_not(stopped, tmp_path):
    """Another seed or another shard is another order; another folder is not."""
    job, checkpoint = stopped
    source = job.data.sources[0]
    for change in ({"seed": 8}, {"shards": source.shards[:1]}, {"io_block_size": 2}):
        data = dataclasses.replace(job.data, sources=(dataclasses.replace(source, **change),))
        changed = dataclasses.replace(_more(job, checkpoint, min(change)), data=data)
        with pytest.raises(
            InputError, match=r"data order .* this run would continue with data order"
        ):
            tiny.run(changed)
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
