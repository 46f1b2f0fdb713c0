"""The format of a document file, by its extension or its first bytes.

Planning imports this module, so it imports only the standard library and the store.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Literal, TypeAlias

from data.read.byte_ranges import FileState, open_ranges
from data.read.retry import redact
from pipeline.errors import InputError

Kind: TypeAlias = Literal["parquet", "lines", "arrow", "text"]

_KINDS: dict[str, Kind] = {
    "parquet": "parquet",
    "jsonl": "lines",
    "ndjson": "lines",
    "arrow": "arrow",
    "txt": "text",
    "text": "text",
    "md": "text",
    "rst": "text",
}
_BY_NAME_ONLY: dict[str, Kind] = {"json": "lines"}  # in a folder, .json files are seldom documents
_COMPRESSED = {"gz": "gzip", "zst": "zstd"}
_REFUSED = {
    *("csv", "tsv", "xlsx", "xls", "pdf", "doc", "docx", "epub", "zip", "tar", "tgz", "rar", "7z"),
    *("bz2", "xz", "lz4", "npy", "npz", "bin", "pkl", "pickle", "pt", "safetensors", "db"),
}
_BLOCK = 4 << 20
_FED = 64 << 10  # bytes of gzip at once: a member's end copies the rest of them
_GZIP = 16 + zlib.MAX_WBITS
_LONG_WINDOW = "too much memory"  # of zstd's own message
READ = "Parquet, JSON lines (.jsonl, .ndjson, .json), Arrow, and text"


def is_document_file(name: str) -> bool:
    """Whether a file in a folder is read: its extension is known and no part of it is hidden."""
    if any(part.startswith((".", "_")) for part in name.split("/")):
        return False
    return _endings(name)[0] in _KINDS


def compression(url: str) -> str:
    """Name of the compression of a JSON lines or text file; "" for none."""
    return _COMPRESSED.get(_endings(url)[1], "")


def kind_of(url: str, state: FileState) -> Kind:
    """The format by extension; if that is unknown, Parquet or Arrow by first bytes, else text."""
    if (kind := kind_by_name(url)) is not None:
        return kind
    with open_ranges(url, state) as file:
        head = file.read(6)
    if head.startswith(b"PAR1"):
        return "parquet"
    return "arrow" if head.startswith(b"ARROW1") else "text"


def kind_by_name(url: str) -> Kind | None:
    """The format by the extension; None if only the first bytes can show it."""
    ending, packed = _endings(url)
    if ending in _REFUSED:
        raise InputError(
            f"{redact(url)}: expected {READ}, plain or with .gz or .zst, found a .{ending} file; "
            "convert it, or leave it out of the source"
        )
    kind = _KINDS.get(ending) or _BY_NAME_ONLY.get(ending)
    if packed and kind in ("parquet", "arrow"):
        raise InputError(
            f"{redact(url)}: expected lines or text under .{packed}, found {ending}, which packs "
            "its own columns; unpack the file"
        )
    return kind or ("text" if packed else None)


@contextmanager
def open_stream(url: str, state: FileState, begin: int = 0) -> Iterator[IO[bytes]]:
    """The bytes of a file from `begin` on, decompressed; a corrupt one is refused when read."""
    packed = compression(url)
    if packed and not state.size:
        raise InputError(
            f"{redact(url)}: expected a whole compressed file, found 0 bytes; fetch the file "
            "again, or leave it out of the source"
        )
    with open_ranges(url, state) as raw:
        if not packed:
            raw.seek(begin)
            yield raw
            return
        content = _gunzip(raw) if packed == "gzip" else _unzstd(raw)
        yield _Unpacked(url, content)  # type: ignore[misc]


class _Unpacked:
    """The content of a compressed file, decompressed; raises `InputError` for corrupt data."""

    def __init__(self, url: str, content: Iterator[bytes]) -> None:
        self._url, self._content, self._at = url, content, 0

    def read(self, size: int) -> bytes:
        """The next `size` bytes or up to a block more; fewer only at the end."""
        import pyarrow as pa

        found: list[bytes] = []
        length = 0
        try:
            while length < size and (more := next(self._content, b"")):
                found.append(more)
                length += len(more)
        except (zlib.error, EOFError, OSError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            what, remedy = f"a whole compressed file, found {error}", "fetch the file again"
            if _LONG_WINDOW in str(error):
                what = "a window of at most 128 MiB, found a longer one (zstd --long)"
                remedy = "pack it again, as with zstd -d --long=31 -c OLD.zst | zstd -o NEW.zst"
            raise InputError(
                f"{redact(self._url)}: expected {what} behind {self._at + length:,} bytes of "
                f"content; {remedy}, or leave it out of the source"
            ) from error
        self._at += length
        return b"".join(found)


def _gunzip(raw: IO[bytes]) -> Iterator[bytes]:
    """The content of all gzip members; zeros between and behind them are padding, as for gzip."""
    member, first = None, True
    while block := raw.read(_BLOCK):
        for begin in range(0, len(block), _FED):
            fed = block[begin : begin + _FED]
            while fed := fed if member or first else fed.lstrip(b"\0"):
                member, first = member or zlib.decompressobj(_GZIP), False
                while data := member.decompress(fed, _BLOCK):
                    yield data
                    fed = member.unconsumed_tail
                fed = member.unused_data
                if not member.eof:
                    break
                member = None
    if member is not None:
        raise EOFError("a cut one")


def _unzstd(raw: IO[bytes]) -> Iterator[bytes]:
    import pyarrow as pa

    from data.read.arrow_file import arrow_file

    with arrow_file(raw) as source, pa.CompressedInputStream(source, "zstd") as stream:
        while data := stream.read(_BLOCK):
            yield data


def _endings(url: str) -> tuple[str, str]:
    """(extension of the format, extension of the compression or ""), in lower case."""
    address = re.split("[?#]", url)[0] if url.startswith(("http://", "https://")) else url
    name = address.rpartition("/")[2].lower()
    parts = name.split(".")[1:]
    packed = parts.pop() if parts and parts[-1] in _COMPRESSED else ""
    return (parts[-1] if parts else ""), packed
