"""Verifies whole source files against the SHA-256 that their publisher gives.

Parquet files seldom have page checksums, and without them most flipped bits read as other text.
The hub identifies its large files by SHA-256; elsewhere the digests come from a file `SHA256SUMS`
in the same folder (written by `sha256sum *.parquet > SHA256SUMS`).
"""

from __future__ import annotations

import hashlib
import re

from data.read.byte_ranges import file_state, open_ranges
from data.read.retry import NotThere, redact
from data.source import is_embedded
from pipeline.errors import InputError

SUMS = "SHA256SUMS"

_CHUNK = 8 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def expected_checksum(url: str) -> str | None:
    """The SHA-256 that the file's publisher gives, 64 hexadecimal digits; None without one.

    Raises:
        InputError: the hub has no such file, or `SHA256SUMS` has an invalid line.
        StorageError: the store does not answer.
    """
    if is_embedded(url):
        return None
    if url.startswith("hf://"):
        version = file_state(url).version  # a small file has a Git object id instead of a SHA-256
        return version if _SHA256.fullmatch(version) else None
    address = url.partition("?")[0] if url.startswith(("http://", "https://")) else url
    folder, _, name = address.rpartition("/")
    return _read_sums(f"{folder}/{SUMS}" if folder else SUMS).get(name)


def verify_file(url: str, expected: str) -> None:
    """Read the whole file once and raise unless it has the expected SHA-256.

    Args:
        url: URL of the file.
        expected: 64 hexadecimal digits.

    Raises:
        InputError: the file has another digest (the message has both), or is missing.
        StorageError: the store does not answer.
    """
    digest = hashlib.sha256()
    with open_ranges(url) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected.lower():
        raise InputError(
            f"{redact(url)}: expected SHA-256 {expected.lower()}, found {digest.hexdigest()}; "
            "the file is corrupt or not the one that was published: fetch it again"
        )


def _read_sums(url: str) -> dict[str, str]:
    """Digest by file name; empty if `url` does not exist."""
    try:
        state = file_state(url)
    except NotThere:
        return {}
    with open_ranges(url, state) as file:
        text = file.read().decode("utf-8", errors="replace")
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = _LINE.fullmatch(line)
        if found is None and line.strip():
            raise InputError(
                f"{redact(url)}, line {number}: expected 64 hexadecimal digits, two spaces and a "
                "name; write it with sha256sum"
            )
        if found is not None:
            sums[found[2]] = found[1].lower()
    return sums
