"""Sources are exact addresses."""

import pytest

from data import source
from pipeline.errors import InputError


@pytest.mark.parametrize(
    ("subset", "files"),
    [
        ("sample-10BT", "sample/10BT/*.parquet"),
        ("sample-100BT", "sample/100BT/*.parquet"),
        ("sample-350BT", "sample/350BT/*.parquet"),
        ("default", "data/*/*.parquet"),
        ("CC-MAIN-2024-10", "data/CC-MAIN-2024-10/*.parquet"),
    ],
)
def test_fineweb_edu_subsets(subset, files):
    """Each subset is its folder of the dataset at a pinned commit."""
    pinned = "hf://datasets/HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9/"
    assert source.fineweb_edu(subset) == pinned + files


@pytest.mark.parametrize("revision", ["main", "87f0914", "A" * 40, ""])
def test_a_revision_that_can_move_is_refused(revision):
    """A branch or a short hash does not name exact bytes."""
    with pytest.raises(InputError, match="full commit hash"):
        source.fineweb_edu(revision=revision)


@pytest.mark.parametrize("subset", ["10BT", "", "CC-MAIN-2024-1", "../x"])
def test_an_unknown_subset_is_refused(subset):
    """The message names what was given and what exists."""
    with pytest.raises(InputError, match="sample-10BT") as error:
        source.fineweb_edu(subset)
    assert repr(subset) in str(error.value)
