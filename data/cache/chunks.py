"""The bytes of a token shard: Zarr 3 files, whose every chunk says whether it is what was written.

A shard is a directory of three Zarr arrays:

    tokens      [tokens] uint16 or uint32, all in one Zarr shard (the `sharding_indexed` codec)
    offsets     [documents + 1] int64, where each document begins and the last one ends
    checksums   [chunks + 2] uint32: CRC-32C of the tokens of every chunk in order, then of the
                offsets, then of tokens/zarr.json

TensorStore writes them, from the metadata given here, and lays `tokens/c/0` out regularly, so that
any chunk is found without reading an index: CHUNK little-endian tokens and their CRC-32C, again and
again; the last chunk is filled up with zeros; then the index that Zarr asks for. Whoever writes a
shard reads it back and refuses any other layout, since reading goes around TensorStore: 400 to 500
million tokens a second on a core for rows of 2048, where TensorStore's own reader has 130.

A chunk counts only when its own CRC and the one in `checksums` agree with its bytes: so a chunk, a
file or a directory in the place of another is found, which an inline CRC alone lets pass. There
is no compression and nothing random: the same documents give the same bytes.
"""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np

CHUNK = 1024  # tokens; a row of a multiple of it that begins at one reads nothing beside itself
TOKENS, OFFSETS, CHECKSUMS = "tokens", "offsets", "checksums"
BEYOND_CHUNKS = 2  # entries of `checksums` that are not of chunks
CRC = np.dtype("<u4")
OFFSET = np.dtype("<i8")


def metadata_file(array: str) -> str:
    """Path of an array's metadata inside the shard."""
    return f"{array}/zarr.json"


def data_file(array: str) -> str:
    """Path of an array's only data file inside the shard."""
    return f"{array}/c/0"


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 when every id below `vocab_size` fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def chunk_count(tokens: int) -> int:
    """Chunks that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // CHUNK)


def record_bytes(dtype: np.dtype) -> int:
    """Bytes of one chunk in the file: its tokens and their CRC."""
    return CHUNK * dtype.itemsize + CRC.itemsize


def data_bytes(tokens: int, dtype: np.dtype) -> int:
    """Size of the data file of `tokens` tokens (there is none when there are no tokens)."""
    chunks = chunk_count(tokens)
    return chunks * record_bytes(dtype) + 16 * chunks + CRC.itemsize


def checksum(data: bytes | np.ndarray) -> int:
    """CRC-32C of bytes, or of a contiguous array's bytes."""
    return google_crc32c.value(data)  # type: ignore[bad-argument-type] - arrays need no copy


class ChunkChecker:
    """Tells whether records, as read, are the chunks that were written.

    Args:
        dtype: of the tokens.
        most: records that are checked at once, at most.
    """

    def __init__(self, dtype: np.dtype, most: int) -> None:
        # The CRC of sound records that follow one another depends on nothing but their number.
        empty = seal(np.zeros(CHUNK, dtype))
        self._sound = [checksum(b"")]
        for _ in range(most):
            self._sound.append(google_crc32c.extend(self._sound[-1], empty))

    def agree(self, records: np.ndarray, checksums: np.ndarray) -> bool:
        """Whether every record agrees with its own CRC and with the one it must have.

        One CRC over all records finds what a CRC of each would (it is linear, and their own CRCs
        are compared one by one) at a fraction of the calls.

        Args:
            records: uint8 [n, record_bytes], contiguous.
            checksums: uint32 [n].
        """
        own = np.ascontiguousarray(records[:, -CRC.itemsize :]).view(CRC)[:, 0]
        return bool((own == checksums).all()) and checksum(records) == self._sound[len(records)]


def tokens_of(records: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The tokens [n, CHUNK] in records uint8 [n, record_bytes]: a view."""
    return records[:, : -CRC.itemsize].view(dtype.newbyteorder("<"))


def chunk_checksums(tokens: np.ndarray) -> list[int]:
    """CRC-32C of every chunk's bytes in the file, of tokens [chunks * CHUNK]."""
    little = np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<"))
    return [checksum(chunk) for chunk in little.reshape(-1, CHUNK)]


def regular_index(count: int, dtype: np.dtype) -> np.ndarray:
    """Where the chunks of a data file must lie: uint64 [count, 2], first byte and bytes of each."""
    index = np.full((count, 2), CHUNK * dtype.itemsize + CRC.itemsize, "<u8")
    index[:, 0] = np.arange(count) * index[:, 1]
    return index


def seal(array: np.ndarray) -> bytes:
    """Little-endian bytes of an array, and their CRC-32C."""
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return raw + checksum(raw).to_bytes(CRC.itemsize, "little")


def unseal(data: bytes, dtype: np.dtype) -> np.ndarray | None:
    """The array [n], n > 0, that `seal` made `data` of; None when it is not what `seal` makes."""
    raw, crc = data[: -CRC.itemsize], data[-CRC.itemsize :]
    if not raw or len(raw) % dtype.itemsize:
        return None
    if checksum(raw).to_bytes(CRC.itemsize, "little") != crc:
        return None
    return np.frombuffer(raw, dtype)


def tokens_metadata(tokens: int, dtype: np.dtype, attributes: dict[str, Any]) -> dict[str, Any]:
    """zarr.json of the tokens, parsed."""
    sealed = _sealed_codecs()
    sharding = {"chunk_shape": [CHUNK], "codecs": sealed, "index_codecs": sealed}
    codec = {"name": "sharding_indexed", "configuration": sharding}
    about = _metadata(tokens, max(1, chunk_count(tokens)) * CHUNK, dtype, [codec])
    return about | {"attributes": attributes}


def plain_metadata(length: int, dtype: np.dtype) -> dict[str, Any]:
    """zarr.json, parsed, of an array whose only chunk is what `seal` makes of it."""
    return _metadata(length, length, dtype, _sealed_codecs())


def _sealed_codecs() -> list[dict[str, Any]]:
    return [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


def _metadata(
    length: int, chunk: int, dtype: np.dtype, codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "fill_value": 0,
    }
