"""Bad input is refused before training, in one line, and nothing that was finished is lost."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pipeline.helpers import check_invariants
from tests.steps.mini import MINI, run

pytestmark = pytest.mark.slow  # the first of them makes all that is trained on


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store in which everything up to the shuffled sequences is finished."""
    directory = str(tmp_path_factory.mktemp("store"))
    assert run(directory, "--until", "block_shuffle") == 0
    return directory


def refusal(capsys, store, settings):
    """The error's first line, after checking that it is the cause of a clean exit."""
    finished = check_invariants(store)
    assert run(store, settings=settings) == 1
    error = capsys.readouterr().err
    assert check_invariants(store) >= finished
    assert "Traceback" not in error
    lines = error.splitlines()
    assert len(lines) <= 3, "one line of cause, the log, the command"
    return lines[0]


def test_a_source_that_matches_nothing(capsys, store, tmp_path):
    """Named, at the first step of the graph."""
    source = str(tmp_path / "none-*.parquet")
    assert source in refusal(capsys, store, dataclasses.replace(MINI, source=source))


def test_a_vocabulary_larger_than_the_text_supports(capsys, store):
    """Asked for and possible are both in the line."""
    big = dataclasses.replace(MINI.model, vocab_size=200_000)
    line = refusal(capsys, store, dataclasses.replace(MINI, model=big))
    assert "200000" in line
    assert "entries" in line


def test_a_sequence_longer_than_the_data(capsys, store):
    """Both lengths are in the line."""
    line = refusal(capsys, store, dataclasses.replace(MINI, length=1 << 19))
    assert "524,288" in line
    assert "longer than the data" in line
