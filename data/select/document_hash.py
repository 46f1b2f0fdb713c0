"""Hashes of documents: of the id, which determines the split, and of the text, the content.

All are BLAKE2b (RFC 7693), identical on every platform, over the UTF-8 bytes in Arrow's buffers
without creating Python strings.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from data.read.values import utf8_slices
from pipeline.errors import InputError

_CONTENT_BYTES = 16


def document_hash(ids: list[str] | pa.Array, seed: int) -> np.ndarray:
    """uint64 [documents]: BLAKE2b of each id, keyed by `seed`: its place in every sample."""
    if not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"seed={seed}: expected an integer of 64 bits; use a smaller one")
    key = seed.to_bytes(8, "little", signed=True)
    array = ids if isinstance(ids, pa.Array) else pa.array(ids, pa.string())
    keyed = hashlib.blake2b(digest_size=8, key=key)
    digests = []
    for name in utf8_slices(array):
        hashed = keyed.copy()  # twice as fast as hashing the key again
        hashed.update(name)
        digests.append(hashed.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def text_hash(texts: pa.Array) -> list[bytes]:
    """16-byte BLAKE2b of each text; texts with equal hashes count as equal."""
    return [
        hashlib.blake2b(text, digest_size=_CONTENT_BYTES).digest() for text in utf8_slices(texts)
    ]


def rows_digest(ids: pa.Array, text_hashes: list[bytes]) -> int:
    """A checksum of (id, text) of all rows, independent of their order and division into parts.

    It is the sum modulo 2^128 of BLAKE2b-128 over (hash of the text, id) of each row. It detects
    accidental changes; an attacker with millions of ids could construct two sets of the same sum.
    """
    total = 0
    for content, name in zip(text_hashes, utf8_slices(ids), strict=True):
        row = hashlib.blake2b(content + name, digest_size=_CONTENT_BYTES)
        total += int.from_bytes(row.digest(), "little")
    return total % (1 << 128)


def digest_hex(digest: int) -> str:
    return f"{digest % (1 << 128):032x}"
