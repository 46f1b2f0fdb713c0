"""A position's sequence is the mixture's and the shuffle's choice, looked up by hand."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.block_shuffle import BlockShuffle
from data.batches.dataset import Dataset, Piece
from data.batches.mixture import Mixture, MixturePhase
from data.cache.token_array import TokenArray
from pipeline.errors import InputError
from tests.data.token_shards import rows_of, source, spec, write_shards

LENGTH = 32
SIZES = {"web": [3001, 0, 50, 2000], "code": [999, 31, 31, 31], "books": [1234]}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Three sources: name -> (shards, rows in lists)."""
    root, found, first = tmp_path_factory.mktemp("sources"), {}, 1
    for name, sizes in SIZES.items():
        shards, tokens = write_shards(root / name, sizes, first)
        first += sum(sizes)
        found[name] = (shards, rows_of(tokens, LENGTH))
    return found


def order(rows, **shuffle):
    shuffle = {"io_block_size": 8, "window_blocks": 4, "seed": 0, **shuffle}
    return BlockShuffle(sequences=len(rows), **shuffle)


def test_one_source_follows_its_shuffle(stored):
    """Three epochs of positions, each a lookup of the order in the list of rows."""
    shards, rows = stored["web"]
    with Dataset(spec(source(shards, seed=3))) as dataset:
        assert dataset.sequences == len(rows) == sum(SIZES["web"]) // LENGTH
        assert dataset.is_local
        positions = np.arange(3 * len(rows))
        found = dataset.read(positions)
    assert found.dtype == np.int32
    assert found.tolist() == [rows[row] for row in order(rows, seed=3).rows(positions)]


PHASES = (
    MixturePhase(start=0, weights=(2.0, 1.0, 0.0)),
    MixturePhase(start=700, weights=(0.0, 1.0, 3.0)),
)


@settings(max_examples=20, deadline=None)
@given(positions=st.lists(st.integers(0, 3000), max_size=40), seed=st.integers(0, 3))
def test_a_mixture_draws_from_each_source_in_its_order(stored, positions, seed):
    """Any positions in any order: the source and its n-th sequence, as the mixture says."""
    sources = [source(stored[name][0], name, seed=seed + 9) for name in SIZES]
    with Dataset(spec(*sources, phases=PHASES, seed=seed)) as dataset:
        found = dataset.read(np.array(positions, np.int64)).tolist()
    expected = []
    chosen = Mixture(PHASES, seed).choose(np.array(positions, np.int64))
    for number, index in zip(*(part.tolist() for part in chosen), strict=True):
        rows = stored[list(SIZES)[number]][1]
        row = int(order(rows, seed=seed + 9).rows(np.array([index]))[0])
        expected.append(rows[row])
    assert found == expected


def test_without_phases_sources_come_in_proportion_to_their_rows(stored):
    """In an epoch's worth of positions every source has about as many as it has rows."""
    sources = [source(stored[name][0], name) for name in SIZES]
    with Dataset(spec(*sources)) as dataset:
        counts = [len(stored[name][1]) for name in SIZES]
        assert dataset.sequences == sum(counts)
        rows = dataset.rows(np.arange(20 * sum(counts)))
        drawn = np.histogram(rows, [0, *np.cumsum(counts)])[0]
    assert np.all(np.abs(drawn - 20 * np.array(counts)) <= 10)


def test_specs_that_make_no_data_set_are_refused(stored):
    """The message has the source, or the numbers that do not fit."""
    shards = stored["books"][0]
    with pytest.raises(InputError, match="found none"):
        Dataset(spec())
    with pytest.raises(InputError, match=r"source tiny: 1234 tokens hold no sequence .*=1235"):
        Dataset(spec(source(shards, "tiny"), length=1235))
    with pytest.raises(InputError, match=r"sequence 700 has 3 weights, expected 1.*\(books\)"):
        Dataset(spec(source(shards, "books"), phases=(PHASES[1],)))
    with pytest.raises(InputError, match="sequence_length=0"):
        Dataset(spec(source(shards), length=0))


def test_positions_that_are_not_there_are_refused(stored):
    """Nothing lies before the first position."""
    sources = [source(stored[name][0], name) for name in ("code", "books")]
    for some in (sources, sources[:1]):
        with Dataset(spec(*some)) as dataset, pytest.raises(IndexError):
            dataset.rows(np.array([0, -1]))


@settings(max_examples=15, deadline=None)
@given(data=st.data(), mixed=st.booleans(), end=st.integers(1, 900))
def test_a_token_is_traced_to_every_position_that_reads_it(stored, data, mixed, end):
    """By brute force over all positions: those whose sequence has a token of the piece."""
    names = list(SIZES) if mixed else ["web"]
    sources = [source(stored[name][0], name, seed=9) for name in names]
    phases = PHASES if mixed else ()
    with Dataset(spec(*sources, phases=phases, seed=1)) as dataset:
        number = data.draw(st.integers(0, len(names) - 1))
        shard = data.draw(st.sampled_from([n for n, s in enumerate(SIZES[names[number]]) if s]))
        size = SIZES[names[number]][shard]
        begin = data.draw(st.integers(0, size - 1))
        piece = Piece(number, shard, begin, data.draw(st.integers(1, size - begin)))
        found = dataset.positions(piece, end)
        rows = dataset.rows(np.arange(end))
        stop = piece.begin + piece.size
        for row in range(dataset.sequences):
            there = any(
                p[:2] == piece[:2] and p.begin < stop and begin < p.begin + p.size
                for p in dataset.pieces(row)
            )
            assert there == (row in found)
            if there:
                assert found[row].tolist() == np.flatnonzero(rows == row).tolist()
        chosen, epochs = dataset.origins(np.arange(end))
        read = collections.Counter()
        for at, row in enumerate(rows.tolist()):  # an epoch counts how often it was read before
            assert epochs[at] == read[row]
            assert chosen[at] == dataset.pieces(row)[0].source
            read[row] += 1


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_pieces_have_the_tokens_of_their_row(stored, rows):
    """Read from the shards one piece at a time, joined tails included."""
    shards, expected = stored["web"]
    with Dataset(spec(source(shards))) as dataset, TokenArray(shards, 60_002) as array:
        for row in rows:
            pieces = dataset.pieces(row)
            starts = np.concatenate([[0], array.shard_ends])
            read = [array.read(starts[[p.shard]] + p.begin, p.size)[0].tolist() for p in pieces]
            assert [token for part in read for token in part] == expected[row]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), end=st.integers(1, 400))
def test_a_moved_position_reads_what_another_would(stored, data, end):
    """Rows, epochs and their inverse, by brute force over all positions."""
    shards, _ = stored["web"]
    pairs = data.draw(st.dictionaries(st.integers(0, 299), st.integers(300, 500), max_size=9))
    moved = tuple(sorted(pairs.items()))
    whole = spec(source(shards))
    with Dataset(whole) as plain, Dataset(dataclasses.replace(whole, moved=moved)) as dataset:
        positions = np.arange(end)
        unmoved = np.array([pairs.get(at, at) for at in positions.tolist()])
        assert dataset.rows(positions).tolist() == plain.rows(unmoved).tolist()
        for found, wanted in zip(dataset.origins(positions), plain.origins(unmoved), strict=True):
            assert found.tolist() == wanted.tolist()
        piece = Piece(0, 0, data.draw(st.integers(0, 2900)), 40)
        rows = dataset.rows(positions)
        for row, found in dataset.positions(piece, end).items():
            assert found.tolist() == np.flatnonzero(rows == row).tolist()
