"""Finding a checkpoint from a directory: published, unfinished, or one of several."""

from __future__ import annotations

import dataclasses
import json
import uuid

import pytest

from models.shape import presets
from pipeline.errors import CorruptOutput, InputError
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from steps.checkpoints.find import ABOUT, find

MODEL = presets.tiny
TRAIN = {"sequence_length": 77, "compute_dtype": "bfloat16"}


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path) -> str:
    """Where a train step that nobody has begun would be."""
    if request.param == "disk":
        return str(tmp_path / "train-0123456789")
    return f"memory://{uuid.uuid4().hex}/train-0123456789"


def begin(root: str, generation: str, attempt: str, **changes) -> Ledger:
    """What `steps.train` records before training begins."""
    ledger = Ledger(root, generation)
    about = {"model": dataclasses.asdict(MODEL), "train": TRAIN, "sequences": "shuffle-1"}
    directory = storage.join(root, "attempts", attempt, "shards", ABOUT)
    storage.write_atomic(
        storage.join(directory, "about.json"), json.dumps(about | changes).encode()
    )
    ledger.add(ABOUT, directory, {"content": "c"})
    return ledger


def commit(ledger: Ledger, attempt: str, step: int) -> str:
    """A checkpoint with a record."""
    path = storage.join(ledger.root, "attempts", attempt, "checkpoints", f"{step:08d}.{attempt}")
    storage.write_atomic(storage.join(path, "index.json"), b"{}")
    ledger.add(f"checkpoint/{step:08d}.{attempt}", path, {"step": step})
    return path


def test_the_newest_of_an_unfinished_step(root):
    """With what its model is, and where what it was trained on is."""
    ledger = begin(root, "g", "000001-a")
    older, newer = (commit(ledger, "000001-a", step) for step in (9, 10))
    found = find(root + "/")
    assert (found.path, found.step, found.finished) == (newer, 10, False)
    assert found.model == MODEL
    assert (found.sequence_length, found.compute_dtype) == (77, "bfloat16")
    assert found.sequences == root.replace("train-0123456789", "shuffle-1")
    assert find(older).path == older
    assert find(older).step == 9


def test_a_later_attempt_counts_more_than_a_later_step(root):
    """It may have begun again at an older checkpoint, because the newest was damaged."""
    ledger = begin(root, "g", "000009-a")
    commit(ledger, "000009-a", 400)
    again = commit(ledger, "000010-b", 300)
    assert find(root).path == again


def test_what_was_begun_anew_counts_more(root):
    """A build over other inputs has a ledger of its own, which says what it was made from."""
    commit(begin(root, "z", "000001-a"), "000001-a", 400)
    newer = commit(begin(root, "b", "000002-b", sequences="shuffle-2"), "000002-b", 100)
    found = find(root)
    assert found.path == newer
    assert found.sequences.endswith("/shuffle-2")


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("", "expected the directory of a train step"),
        ("/attempts/000001-a/checkpoints/00000009.000001-a", "there are none"),
        ("/checkpoints", "expected the directory of a train step"),
    ],
)
def test_a_directory_of_nothing(root, inside, words):
    """Neither local nor remote."""
    with pytest.raises(InputError, match=words):
        find(root + inside)


def test_no_checkpoint_yet(root):
    """Training has begun; the advice is to wait."""
    begin(root, "g", "000001-a")
    with pytest.raises(InputError, match="no checkpoint has been committed there yet"):
        find(root)


def test_a_checkpoint_without_a_record_does_not_exist(root):
    """One that is being written is refused, and those that may be used are named."""
    ledger = begin(root, "g", "000001-a")
    path = commit(ledger, "000001-a", 5)
    torn = path.replace("00000005", "00000006")
    storage.write_atomic(storage.join(torn, "arrays", "d"), b"half")
    with pytest.raises(InputError, match="not a committed checkpoint") as refused:
        find(torn)
    assert path in str(refused.value)
    assert find(root).path == path


def test_a_store_is_not_a_step(root):
    """The steps in it are named."""
    commit(begin(root, "g", "000001-a"), "000001-a", 5)
    with pytest.raises(InputError, match="a store, not a step; give one of train"):
        find(root.rpartition("/")[0])


def test_checkpoints_of_nobody_knows_what(root):
    """Of a version that did not record it, or with a torn record."""
    ledger = Ledger(root, "g")
    commit(ledger, "000001-a", 5)
    with pytest.raises(InputError, match="do not say what model they are of"):
        find(root)
    begin(root, "g", "000001-a")
    assert find(root).step == 5
    torn = storage.join(root, "attempts", "000001-a", "shards", ABOUT, "about.json")
    storage.write_atomic(torn, b'{"model":')
    with pytest.raises(CorruptOutput, match=r"about\.json"):
        find(root)


def test_a_file(tmp_path):
    """Such as a manifest."""
    file = tmp_path / "manifest.json"
    file.write_text("{}")
    with pytest.raises(InputError, match="expected a directory, found a file"):
        find(str(file))


def test_the_tokenizer_of_sequences_that_are_gone(root):
    """Named, with the way out."""
    commit(begin(root, "g", "000001-a"), "000001-a", 5)
    with pytest.raises(CorruptOutput, match=r"shuffle-1: .* --tokenizer FILE"):
        find(root).tokenizer()
