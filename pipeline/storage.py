"""The edge to storage: every read and write of the engine goes through fsspec, here.

A location is a URL string (`./runs/x`, `/abs/x`, `gs://bucket/x`, `memory://x`). Two operations
carry the commit protocol:

- `create` writes an object only if none is there, and its content appears whole or not at all.
  Who wins a race is the store's decision: a hard link of a finished temporary file on a local
  disk, a precondition (`ifGenerationMatch=0`) on GCS.
- `write_atomic` replaces an object; readers see the old bytes or the new, never a mixture.

Nothing here renames a directory: object stores cannot.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterator
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import InputError, StorageError

_memory_lock = threading.Lock()
_CHUNK = 1 << 22


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of `url` and the path inside it."""
    # Typed as Any: fsspec's annotations admit text where only bytes are ever read or written.
    return url_to_fs(url)


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine's disks."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """The absolute path of a local `url`. Raises `InputError` when it is not local."""
    if not is_local(url):
        raise InputError(f"expected a path on this machine, got {url!r}")
    return filesystem(url)[1]


def normalise(url: str) -> str:
    """`url` with a local path made absolute, and no trailing slash."""
    return local_path(url) if is_local(url) else url.rstrip("/")


def join(root: str, *parts: str) -> str:
    """`root` extended by relative `parts`; a part that could leave `root` raises `InputError`."""
    names: list[str] = []
    for part in parts:
        for name in part.split("/"):
            if name in ("", ".", "..") or "\\" in name or "\0" in name or len(name) > 255:
                raise InputError(f"expected a plain relative path under {root!r}, got {part!r}")
            names.append(name)
    return "/".join([root.rstrip("/"), *names])


def exists(url: str) -> bool:
    """Whether an object or a directory is at `url`, asked of the store and not of a cache."""
    fs, path = filesystem(url)
    fs.invalidate_cache()
    return fs.exists(path)


def size(url: str) -> int | None:
    """Size in bytes of the object at `url`; None when there is none."""
    fs, path = filesystem(url)
    try:
        return os.stat(path).st_size if isinstance(fs, LocalFileSystem) else fs.info(path)["size"]
    except FileNotFoundError:
        return None


def read_bytes(url: str) -> bytes:
    """The object's content. Raises `FileNotFoundError` when it is not there."""
    fs, path = filesystem(url)
    return fs.cat_file(path)


def read_json(url: str) -> Any:
    """The object's content as JSON. Raises `FileNotFoundError`, or `ValueError` when torn."""
    return json.loads(read_bytes(url).decode("utf-8"))


def open_read(url: str) -> IO[bytes]:
    """Open an object for random-access reading."""
    fs, path = filesystem(url)
    return fs.open(path, "rb")


def open_write(url: str) -> IO[bytes]:
    """Open an object for writing; parent directories are made. Not atomic: for attempt files."""
    fs, path = filesystem(url)
    fs.makedirs(os.path.dirname(path), exist_ok=True)
    return fs.open(path, "wb")


def _write_temporary(path: str, data: bytes) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def create(url: str, data: bytes) -> bool:
    """Write `data` at `url` if nothing is there. True when written, False when it existed.

    The content appears whole or not at all, and of any number of racing callers one gets True.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        temporary = _write_temporary(path, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True
    if fs.protocol == "memory":
        with _memory_lock:
            if fs.exists(path):
                return False
            fs.pipe_file(path, data)
            return True
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except NotImplementedError as error:
        raise StorageError(
            f"{url}: this store has no conditional create, which publishing an output needs; "
            "use a local path or gs://"
        ) from error
    return True


def write_atomic(url: str, data: bytes) -> None:
    """Replace the object at `url` by `data`; a reader sees all of the old or all of the new."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        os.replace(_write_temporary(path, data), path)
    else:
        fs.pipe_file(path, data)


def append_line(url: str, line: str) -> None:
    """Append one line to a log object. One writer only; object stores rewrite the object."""
    data = line.encode("utf-8") + b"\n"
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)
    else:
        fs.pipe_file(path, (fs.cat_file(path) if fs.exists(path) else b"") + data)


def list_names(url: str) -> list[str]:
    """Sorted names directly under a directory; empty when there is no such directory."""
    fs, path = filesystem(url)
    fs.invalidate_cache()
    try:
        found = fs.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})


def list_files(url: str) -> Iterator[tuple[str, int]]:
    """(path relative to `url`, size in bytes) of every object under `url`, sorted by path."""
    fs, path = filesystem(url)
    fs.invalidate_cache()
    prefix = path.rstrip("/") + "/"
    try:
        found = fs.find(path, detail=True)
    except FileNotFoundError:
        return
    for name, info in sorted(found.items()):
        if not name.endswith(".tmp"):
            yield name.removeprefix(prefix), info["size"]


def sha256(url: str) -> str:
    """Hex SHA-256 of the object's content, read in chunks of 4 MiB."""
    digest = hashlib.sha256()
    with open_read(url) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def delete_tree(url: str) -> None:
    """Delete everything under `url`; not being there is fine."""
    fs, path = filesystem(url)
    try:
        fs.rm(path, recursive=True)
    except FileNotFoundError:
        return
