"""The index of a checkpoint: what is in it, and the proof that it is still there.

`index.json` is written after everything else, so a checkpoint without one is none. It has the
step, every array (axes, shape, dtype, chunks, CRC-32C and SHA-256 of every chunk), every small file
(size, SHA-256) and a digest of itself. All digests were taken of the bytes that were given to the
store: nothing is read back to save. A missing, truncated, changed or exchanged file does not agree
with the index when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.errors import CorruptOutput, InputError, StorageError
from pipeline.identity.fingerprint import digest
from pipeline.store import storage
from training.checkpoint.chunk_grid import CRC_BYTES, ChunkGrid, chunk_file
from training.checkpoint.files import Files, damaged

INDEX = "index.json"
PROGRESS = "progress.json"
FORMAT = 3

# Path inside the checkpoint, size in bytes, hex SHA-256.
Measured = tuple[str, int, str]


@dataclass
class WrittenChunks:
    """Chunks and small files that a process wrote, with their digests.

    Attributes:
        chunks: [CRC-32C of the values, SHA-256 of the file] by number, by array.
        files: the other files.
    """

    chunks: dict[str, dict[int, tuple[int, str]]] = field(default_factory=dict)
    files: list[Measured] = field(default_factory=list)

    def add_file(self, files: Files, name: str, content: bytes) -> None:
        """Write a small file and remember it."""
        files.write(name, content)
        self.remember(name, content)

    def remember(self, name: str, content: bytes) -> None:
        """A small file of this content is there."""
        self.files.append((name, len(content), hashlib.sha256(content).hexdigest()))

    def join(self, other: WrittenChunks) -> None:
        """Add what another process wrote."""
        for name, chunks in other.chunks.items():
            self.chunks.setdefault(name, {}).update(chunks)
        self.files += other.files

    def to_json(self) -> dict[str, Any]:
        """For `from_json`, by way of JSON."""
        chunks = {name: [[n, *c] for n, c in found.items()] for name, found in self.chunks.items()}
        return {"chunks": chunks, "files": self.files}

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> WrittenChunks:
        """The inverse of `to_json`."""
        chunks = {
            name: {n: (crc, sha256) for n, crc, sha256 in found}
            for name, found in tree["chunks"].items()
        }
        return WrittenChunks(chunks, [(name, size, sha256) for name, size, sha256 in tree["files"]])


def with_digest(content: Any) -> bytes:
    """JSON of `content` with its digest, for `verify_digest`."""
    return json.dumps({"content": content, "sha256": digest(content)}).encode()


def verify_digest(url: str, what: str) -> Any:
    """The content that `with_digest` gave the bytes at `url`.

    Raises:
        CorruptOutput: when it is missing, torn or changed.
    """
    try:
        document = storage.read_json(url)
        content = document["content"]
        sound = document["sha256"] == digest(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptOutput(f"{url}: {what} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptOutput(f"{url}: {what} is not readable: {error}") from error
    if not sound:
        raise CorruptOutput(f"{url}: {what} differs from its own digest")
    return content


def write_index(path: str, step: int, leaves: Mapping[str, Any], written: WrittenChunks) -> None:
    """Make the checkpoint at `path` whole.

    Args:
        path: of the checkpoint.
        step: of the run.
        leaves: axes, shape, dtype and chunk of every array.
        written: by all processes.

    Raises:
        StorageError: when somebody's chunk is missing.
    """
    described = {}
    for name, entry in leaves.items():
        chunks = written.chunks.get(name, {})
        expected = ChunkGrid(tuple(entry["shape"]), tuple(entry["chunk"])).chunks
        if sorted(chunks) != list(range(expected)):
            raise StorageError(
                f"{path}: expected {expected} chunks of {name}, the processes "
                f"wrote {len(chunks)}; they do not agree on how it is split"
            )
        ordered = [chunks[number] for number in range(expected)]
        described[name] = {
            **entry,
            "crc32c": [crc for crc, _ in ordered],
            "sha256": [sha256 for _, sha256 in ordered],
        }
    content = {
        "format": FORMAT,
        "step": step,
        "leaves": described,
        "files": [list(file) for file in sorted(written.files)],
    }
    storage.write_atomic(storage.join(path, INDEX), with_digest(content))


def read_index(path: str) -> dict[str, Any]:
    """The index of the checkpoint at `path`.

    Raises:
        CorruptOutput: when it is missing, torn or changed.
        InputError: when it was written by another version of this code.
    """
    url = storage.join(path, INDEX)
    content = verify_digest(url, "the checkpoint's index")
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise InputError(
            f"{url}: expected format {FORMAT}, found {found}; resume with the version that wrote "
            "the checkpoint"
        )
    return content


def measured(index: Mapping[str, Any]) -> Iterator[Measured]:
    """Every file of the checkpoint but the index: path, size and SHA-256, as written."""
    yield from (tuple(file) for file in index["files"])
    for name, entry in index["leaves"].items():
        grid = ChunkGrid(tuple(entry["shape"]), tuple(entry["chunk"]))
        size = math.prod(grid.chunk) * entry["itemsize"] + CRC_BYTES
        for chunk, sha256 in zip(grid.every(), entry["sha256"], strict=True):
            yield chunk_file(name, chunk), size, sha256


def content_of(index: Mapping[str, Any]) -> str:
    """Digest of what the checkpoint says: its step and arrays, from digests taken while it was
    written; nothing of progress and times."""
    return digest({"step": index["step"], "leaves": index["leaves"]})


def check_file(path: str, files: Files, name: str, size: int, sha256: str) -> bytes:
    """The content of a small file of the checkpoint at `path`, as the index has it.

    Raises:
        CorruptOutput: it is missing or changed.
        StorageError: the store failed.
    """
    content = np.empty(size, np.uint8)
    files.read(name, content)
    if hashlib.sha256(content.data).hexdigest() != sha256:
        raise damaged(path, name, "another content")
    return content.tobytes()
