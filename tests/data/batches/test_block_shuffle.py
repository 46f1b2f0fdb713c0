"""Orders are bijections of every epoch, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data.batches.block_shuffle import BlockShuffle
from pipeline.errors import InputError


def shuffle(sequences, io_block_size=4, window_blocks=3, seed=0):
    return BlockShuffle(
        sequences=sequences, io_block_size=io_block_size, window_blocks=window_blocks, seed=seed
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    sequences=st.integers(1, 500), io_block_size=st.integers(1, 20), window_blocks=st.integers(1, 9)
)
def test_a_window_reads_its_blocks_and_no_others(sequences, io_block_size, window_blocks):
    """Rows come window by window: each holds whole blocks, at most `window_blocks` of them."""
    order = shuffle(sequences, io_block_size, window_blocks)
    blocks = order.rows(np.arange(sequences)) // io_block_size
    place = 0
    seen = set()
    while place < sequences:
        window, size = set(), 0
        while len(window) < window_blocks and place + size < sequences:
            window.add(int(blocks[place + size]))
            size = sum(min(io_block_size, sequences - b * io_block_size) for b in window)
            members = set(blocks[place : place + size].tolist())
            if len(members) > len(window):
                window = members
                size = sum(min(io_block_size, sequences - b * io_block_size) for b in window)
        assert len(window) <= window_blocks
        assert set(blocks[place : place + size].tolist()) == window
        assert not window & seen
        seen |= window
        place += size


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.integers(1, 100_000),
    io_block_size=st.integers(1, 500) | st.just(100_000),
    window_blocks=st.integers(1, 500) | st.just(100_000),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**4),
)
def test_any_epoch_of_any_size_has_every_row_once(
    sequences, io_block_size, window_blocks, seed, epoch
):
    """Up to 100,000 rows, any epoch: a permutation, and the next epoch's is another."""
    # Windows of few rows cost a permutation each; they are tried on small sets above.
    assume(sequences / (io_block_size * window_blocks) < 200)
    order = shuffle(sequences, io_block_size, window_blocks, seed)
    rows = order.rows(np.arange(epoch * sequences, (epoch + 2) * sequences)).reshape(2, sequences)
    for each in rows:
        assert np.array_equal(np.bincount(each, minlength=sequences), np.ones(sequences))
    if sequences > 50:
        assert not np.array_equal(rows[0], rows[1])


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.integers(300, 30_000),
    start=st.integers(0, 10**12),
    spans=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
)
def test_batches_and_scattered_positions_agree(sequences, start, spans):
    """Consecutive requests of any length give what the same positions give far apart."""
    order = shuffle(sequences, 8, 64)
    for span in spans:
        positions = np.arange(start, start + span)
        together = order.rows(positions)
        scattered = order.rows(np.append(positions, start + 10**6))[:-1]
        assert np.array_equal(together, scattered)
        start += span


def test_what_a_caller_changes_stays_its_own():
    """Rows that were handed out are not shared with later requests."""
    order = shuffle(5000)
    first = order.rows(np.arange(4096))
    kept = first.copy()
    first[:] = -1
    assert np.array_equal(order.rows(np.arange(4096)), kept)


def test_the_order_is_frozen():
    """Recorded runs can be repeated: these rows may never change."""
    order = shuffle(1001, 10, 4, 7)
    assert order.rows(np.array([0, 1, 2, 500, 1000, 1001, 10**9])).tolist() == FROZEN


FROZEN = [718, 713, 622, 193, 416, 831, 269]


@pytest.mark.parametrize("field", ["sequences", "io_block_size", "window_blocks"])
def test_sizes_below_one_are_refused(field):
    """The message has the field and the value."""
    sizes = {"sequences": 5, "io_block_size": 1, "window_blocks": 1, field: 0}
    with pytest.raises(InputError, match=f"{field}=0"):
        BlockShuffle(**sizes, seed=0)


def test_negative_positions_are_refused():
    """There is nothing before the first sequence."""
    with pytest.raises(IndexError):
        shuffle(10).rows(np.array([-1]))


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.integers(1, 150),
    io_block_size=st.integers(1, 20),
    window_blocks=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_a_place_is_where_the_order_reads_the_row(sequences, io_block_size, window_blocks, epoch):
    """Of every row of every epoch, whichever block is short."""
    order = shuffle(sequences, io_block_size, window_blocks, seed=epoch * 7)
    rows = order.rows(np.arange(sequences) + epoch * sequences)
    assert [order.place(row, epoch) for row in rows.tolist()] == list(range(sequences))
