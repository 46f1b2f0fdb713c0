"""The bytes of a shard, against plain Python and TensorStore's own reader."""

import hashlib
import json
import struct

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache import chunks, token_shard
from data.cache.chunks import CHUNK, ChunkChecker

LENGTHS = [0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 300 * CHUNK + 9]


def encoded(tokens):
    """The data file and the CRC of every chunk, in plain Python."""
    little = tokens.astype(tokens.dtype.newbyteorder("<"))
    content, index, checksums = b"", b"", []
    for begin in range(0, len(tokens), CHUNK):
        raw = little[begin : begin + CHUNK].tobytes().ljust(CHUNK * tokens.itemsize, b"\0")
        checksums.append(google_crc32c.value(raw))
        index += struct.pack("<QQ", len(content), len(raw) + 4)
        content += raw + struct.pack("<I", checksums[-1])
    if index:
        content += index + struct.pack("<I", google_crc32c.value(index))
    return content, checksums


def write(directory, tokens, cuts=()):
    """A shard of these tokens, whose documents come in batches cut at these documents."""
    wide = tokens.dtype == np.uint32
    documents = np.split(tokens, np.flatnonzero(tokens == 0) + 1)[:-1]
    parts = []
    for batch in np.split(np.arange(len(documents)), sorted(cuts)):
        lengths = np.array([len(documents[n]) - 1 for n in batch], np.int64)
        ids = [documents[n][:-1] for n in batch] or [tokens[:0]]
        parts.append((np.concatenate(ids), lengths))
    size = 1 << 20 if wide else 60_000
    return token_shard.write_shard(str(directory), parts, vocab_size=size, eos_id=0)


def random_tokens(length, dtype="uint16", seed=0):
    """Random ids, an EOS here and there and one at the end."""
    top = 60_000 if dtype == "uint16" else 1 << 20
    tokens = np.random.default_rng(seed).integers(1, top, length).astype(dtype)
    tokens[tokens % 700 == 3] = 0
    tokens[-1:] = 0
    return tokens


def opened(directory, array, **more):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/{array}/"}}
    return ts.open(spec | {"fill_missing_data_reads": False} | more).result()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("length", LENGTHS)
def test_files_are_laid_out_as_readers_expect(tmp_path, length, dtype):
    """Every file, byte by byte as plain Python has it; zarr.json as the metadata asks for."""
    tokens = random_tokens(length, dtype)
    write(tmp_path, tokens)
    content, checksums = encoded(tokens)
    offsets = np.array([0, *(np.flatnonzero(tokens == 0) + 1)], "<i8")
    abouts = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/zarr.json")}
    checksums += [google_crc32c.value(offsets.tobytes()), google_crc32c.value(abouts["tokens"])]
    every = np.array(checksums, "<u4")
    expected = {"tokens": content, "offsets": sealed(offsets), "checksums": sealed(every)}
    found = {path.parent.parent.name: path.read_bytes() for path in tmp_path.glob("*/c/0")}
    assert found == {name: data for name, data in expected.items() if data}
    if length:
        assert len(content) == chunks.data_bytes(length, np.dtype(dtype))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6 - (not length)
    attributes = {"vocab_size": 1 << 20 if dtype == "uint32" else 60_000, "eos_id": 0}
    metadata = {
        "tokens": chunks.tokens_metadata(length, np.dtype(dtype), attributes | {"tokenizer": ""}),
        "offsets": chunks.plain_metadata(len(offsets), np.dtype("int64")),
        "checksums": chunks.plain_metadata(len(every), np.dtype("uint32")),
    }
    assert {name: json.loads(about) for name, about in abouts.items()} == metadata


def sealed(array):
    """An array's bytes and their CRC."""
    raw = array.tobytes()
    return raw + struct.pack("<I", google_crc32c.value(raw))


@pytest.mark.parametrize(("vocab_size", "length"), [(500, 0), (500, 5000), (100_000, 3 * CHUNK)])
def test_tensorstore_alone_reads_a_shard(tmp_path, vocab_size, length):
    """Tokens, offsets and checksums, by nothing but the path; checksums by a plain loop."""
    ids = np.random.default_rng(0).integers(1, vocab_size, length).astype(np.uint32)
    documents = [(ids, np.array([length - 7, 7]))] if length else []
    written = token_shard.write_shard(
        str(tmp_path / "s"), documents, vocab_size=vocab_size, eos_id=0, tokenizer_digest="ab"
    )
    tokens = opened(tmp_path / "s", "tokens")
    offsets = opened(tmp_path / "s", "offsets").read().result()
    checksums = opened(tmp_path / "s", "checksums").read().result()
    found = tokens.read().result()
    if length:
        assert found.tolist() == [*ids[:-7].tolist(), 0, *ids[-7:].tolist(), 0]
        assert offsets.tolist() == [0, length - 6, length + 2]
    else:
        assert (found.tolist(), offsets.tolist()) == ([], [0])
    padded = np.zeros(-(-len(found) // CHUNK) * CHUNK, found.dtype)
    padded[: len(found)] = found
    expected = [google_crc32c.value(part.tobytes()) for part in padded.reshape(-1, CHUNK)]
    expected.append(google_crc32c.value(offsets.astype("<i8").tobytes()))
    expected.append(google_crc32c.value((tmp_path / "s/tokens/zarr.json").read_bytes()))
    assert checksums.tolist() == expected
    assert hashlib.sha256(checksums.astype("<u4").tobytes()).hexdigest() == written.check
    attributes = tokens.spec().to_json()["metadata"]["attributes"]
    assert attributes == {"vocab_size": vocab_size, "eos_id": 0, "tokenizer": "ab"}


def _records(count, dtype="uint16", seed=0):
    content, checksums = encoded(random_tokens(count * CHUNK, dtype, seed))
    size = chunks.record_bytes(np.dtype(dtype))
    records = np.frombuffer(content, np.uint8, count * size).reshape(count, size).copy()
    return records, np.array(checksums, np.uint32)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(1, 6))
def test_damage_never_agrees(data, count):
    """Bits, runs of bytes, chunks in each other's places, with or without their own CRC."""
    records, checksums = _records(count)
    original, size = records.copy(), records.shape[1]
    kind = data.draw(st.sampled_from(["bits", "bytes", "swap", "twins", "resealed"]))
    row = data.draw(st.integers(0, count - 1))
    other = data.draw(st.integers(0, count - 1))
    at = data.draw(st.integers(0, size - 1))
    if kind == "bits":
        for bit in data.draw(st.sets(st.integers(0, records.size * 8 - 1), min_size=1, max_size=9)):
            records.reshape(-1)[bit // 8] ^= 1 << bit % 8
    elif kind == "bytes":
        end = data.draw(st.integers(at, size - 1)) + 1
        records[row, at:end] ^= data.draw(st.integers(1, 255))
    elif kind == "swap":
        records[[row, other]] = records[[other, row]]
    elif kind == "twins":
        for place in {row, other}:
            records[place, at] ^= 1
    else:
        records[row, :-4] = _records(1, seed=1)[0][0, :-4]
        crc = google_crc32c.value(records[row, :-4].tobytes())
        records[row, -4:] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    sound = np.array_equal(records, original)
    assert ChunkChecker(np.dtype(np.uint16), 6).agree(records, checksums) == sound


def test_sealed_arrays_come_back_or_do_not():
    """Every cut and every flipped bit of a small array is seen."""
    for array in (np.arange(5, dtype="<i8"), np.arange(7, dtype="<u4"), np.zeros(1, "<i8")):
        sealed = chunks.seal(array)
        assert np.array_equal(chunks.unseal(sealed, array.dtype), array)
        for length in range(len(sealed)):
            assert chunks.unseal(sealed[:length], array.dtype) is None
        for bit in range(len(sealed) * 8):
            flipped = bytearray(sealed)
            flipped[bit // 8] ^= 1 << bit % 8
            assert chunks.unseal(bytes(flipped), array.dtype) is None
