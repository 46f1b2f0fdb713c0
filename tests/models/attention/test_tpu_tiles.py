"""What a block of queries sees, against brute force; the chosen sizes and their cycles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.shape.tpu_tiles import (
    LANES,
    Row,
    Sight,
    buffers_of,
    choose_sight,
    needs_shift,
    row_cycles,
)
from tests.tpu_compiler import needs_libtpu, printed


def computed(sight, positions):
    """How often each (key, query) is computed as seen, and whether a mask was applied to it."""
    times = np.zeros((positions, positions), int)
    for start in range(0, positions, sight.block):
        here = start // sight.chunk
        first = 0 if sight.whole is None else max(here - sight.whole, 0)
        times[first * sight.chunk : start, start : start + sight.block] += 1
        for before, offsets in enumerate(sight.partial()):
            if start < before * sight.block:
                continue
            for offset in offsets:
                for piece in sight.pieces(offset):
                    assert piece.first % LANES == 0 == piece.last % LANES
                    keys = np.arange(start + offset, start + offset + sight.chunk)[:, None]
                    queries = np.arange(start + piece.first, start + piece.last)[None]
                    seen = np.ones((len(keys), queries.size), bool)
                    if piece.causal:
                        seen &= keys <= queries
                    if piece.windowed:
                        seen &= keys + sight.window > queries
                    times[keys, queries] += seen
    return times


@given(
    chunk=st.sampled_from([128, 256]),
    chunks=st.integers(1, 3),
    blocks=st.integers(1, 4),
    window=st.none() | st.integers(1, 2000),
)
def test_every_seen_pair_is_computed_once_and_no_other(chunk, chunks, blocks, window):
    """Triangles and edges cut into pieces: masked where they must be, and nowhere skipped."""
    sight = Sight(chunk * chunks, chunk, window)
    positions = sight.block * blocks
    at = np.arange(positions)
    seen = at[:, None] <= at
    if window is not None:
        seen &= at - at[:, None] < window
    assert (computed(sight, positions) == seen).all()


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize(
    ("positions", "block", "chunk"), [(8192, 2048, 512), (1024, 1024, 512), (128, 128, 128)]
)
def test_the_chosen_sizes(head_size, positions, block, chunk):
    """Large blocks, since a step of the grid costs as much as 400,000 scores."""
    row = Row(positions, positions, head_size, None, shift=False)
    assert choose_sight(row) == Sight(block, chunk, None)


@given(st.integers(1, 200), st.sampled_from([64, 128, 256]), st.booleans())
def test_any_length_has_sizes(tiles, head_size, shift):
    """Blocks divide the row, chunks the block."""
    row = Row(tiles * LANES, tiles * LANES, head_size, None, shift)
    sight = choose_sight(row)
    assert row.queries % sight.block == 0 == sight.block % sight.chunk


def test_vector_memory_holds_the_rows_that_users_have():
    """Two heads' keys where they fit, one where they do not, none beyond."""
    found = {}
    for size, positions in ((64, 32768), (128, 16384), (256, 16384), (128, 32768), (128, 65536)):
        row = Row(positions, positions, size, None, shift=False)
        sight = choose_sight(row)
        found[size, positions] = buffers_of(row, sight, 2, segments=False)
    assert list(found.values()) == [2, 2, 1, 1, 0]


def test_scores_are_shifted_where_nothing_bounds_them():
    assert needs_shift(normalized=False, soft_cap=None)
    assert needs_shift(normalized=False, soft_cap=61.0)
    assert not needs_shift(normalized=False, soft_cap=60.0)
    assert not needs_shift(normalized=True, soft_cap=None)


@pytest.mark.slow
@needs_libtpu
def test_cycles_are_those_of_the_compilers_schedule():
    """Of rows with and without a window, by the bench, which prints what it promises."""
    bench = ("-m", "tests.bench.attention_cycles", "--head", "64", "--kernel", "ponente")
    (full,) = printed(*bench, "--positions", "4096")
    (windowed,) = printed(*bench, "--positions", "4096", "--window", "1024")
    for line, window in ((full, None), (windowed, 1024)):
        row = Row(4096, 4096, 64, window, shift=False)
        assert line["tile"] == [choose_sight(row).block, choose_sight(row).chunk]
        forward, backward = row_cycles(row, choose_sight(row))
        assert line["forward"] == pytest.approx(forward, rel=0.2 if window else 0.1)
        assert line["backward"] == pytest.approx(backward, rel=0.2 if window else 0.1)
