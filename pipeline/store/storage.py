"""The edge to storage: every read and write of the engine goes through fsspec, here.

A location is a URL string (`./runs/x`, `/abs/x`, `gs://bucket/x`, `s3://bucket/x`, `memory://x`).
Three operations carry the commit protocol:

- `create` writes an object only if none is there, and its content appears whole or not at all.
  Who wins a race is the store's decision: a hard link of a finished temporary file on a local
  disk, a precondition (`ifGenerationMatch=0`, `If-None-Match: *`) on GCS and S3. There the answer
  to a write may be lost and the write sent again, and refused because of itself; a mark in the
  object's metadata tells.
- `replace_if` replaces or deletes an object only while it is the version that was read: a
  generation match on GCS, of the ETag on S3, a comparison under a file lock on a local disk.
- `write_atomic` replaces an object; readers see the old bytes or the new, never a mixture.

Nothing here renames a directory: object stores cannot.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from glob import has_magic
from typing import IO, Any

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import InputError, StorageError
from pipeline.store import local_storage
from pipeline.store.decode import parse_json

_give_up_after: ContextVar[float | None] = ContextVar("give_up_after", default=None)
_memory_lock = threading.Lock()
_CHUNK = 1 << 22
_GOOGLE = ("gs://", "gcs://")
_BUCKETS = (*_GOOGLE, "s3://")
_STORES = ("gs", "gcs", "s3", "memory")
_LOCAL = LocalFileSystem()
# What means the same on every store and in every tool: nothing that a shell, a URL, a glob or
# fsspec's chained URLs read as more than a letter, and no two names that look alike.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.=+@,~][A-Za-z0-9_.=+@,~-]{0,254}")
_TEMPORARY = re.compile(r".*\.[0-9a-f]{32}\.tmp")


def filesystem(url: str, give_up_after: float | None = None) -> tuple[Any, str]:
    """The fsspec filesystem of `url` and the path inside it.

    Args:
        url: see the module's text.
        give_up_after: seconds of retrying one request to a bucket; None for its usual time.
    """
    if url.startswith(_BUCKETS):
        # No listings cache: it would answer about objects that others wrote since.
        limit = _give_up_after.get() if give_up_after is None else give_up_after
        options = {} if limit is None else {"give_up_after": limit}
        fs = _bucket_class(url)(use_listings_cache=False, **options)
        return fs, url.partition("://")[2].rstrip("/")
    if ":" not in url:
        return _LOCAL, os.path.abspath(os.path.expanduser(url))
    # Typed as Any: fsspec's annotations admit text where only bytes are ever read or written.
    return url_to_fs(url)


def _bucket_class(url: str) -> Any:
    """Imported where it is used: the clients of buckets take a second to import."""
    if url.startswith(_GOOGLE):
        from pipeline.store.google_storage import GoogleStorage

        return GoogleStorage
    from pipeline.store.s3_storage import S3Storage

    return S3Storage


@contextlib.contextmanager
def giving_up_after(seconds: float) -> Iterator[None]:
    """Within the block, this thread's requests are retried for so many seconds at most."""
    token = _give_up_after.set(seconds)
    try:
        yield
    finally:
        _give_up_after.reset(token)


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine's disks."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """The absolute path of a local `url`. Raises `InputError` when it is not local."""
    if not is_local(url):
        raise InputError(f"expected a path on this machine, got {url!r}")
    return filesystem(url)[1]


def normalise(url: str) -> str:
    """`url` with a local path made absolute, gs:// for gcs://, and no trailing slash.

    Raises:
        InputError: for what is neither a path nor a URL of a store we can reach, before any access.
    """
    wrong = _wrong_with(url)
    if wrong:
        raise InputError(
            f"store {url!r}: {wrong}; expected a path or a URL such as gs://bucket/x or "
            "s3://bucket/x"
        )
    if is_local(url):
        return local_path(url)
    scheme, _, path = url.rstrip("/").partition("://")
    return f"{'gs' if scheme == 'gcs' else scheme}://{path}"


def _wrong_with(url: str) -> str:
    """Why `url` cannot name a store; empty when it can."""
    if not url or url != url.strip() or not url.isprintable():
        return "empty, or with spaces around it or control characters in it"
    if "::" in url:
        return "'::' would be read as a chain of URLs"
    if match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(?!//)", url):
        return f"{match[1]}: is not followed by two slashes (a path would begin with ./)"
    if is_local(url):
        known = not url.startswith("~") or os.path.expanduser(url) != url
        return "" if known else "no such user"
    scheme, _, path = url.partition("://")
    if scheme not in _STORES:
        return f"{scheme}:// has no conditional write that we know, which publishing needs"
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        return f"{error} (pip install 'ponente[{scheme}]')"
    names = path.rstrip("/").split("/")
    if not names[0] or any(name in ("", ".", "..") or set(name) & set("*?[]#\\") for name in names):
        return "no bucket, an empty or dotted part, or one of *?[]#\\ in it"
    return ""


def join(root: str, *parts: str) -> str:
    """`root` extended by relative `parts`.

    Raises:
        InputError: for a part that could leave `root`, or that some store or tool could read as
            another name than it is: only ASCII letters, digits and `_.=+@,~-` are taken, no `-` in
            front, no `.` or `.tmp` at the end, at most 255 to a name.
    """
    names: list[str] = []
    for part in parts:
        for name in part.split("/"):
            if not _PLAIN_NAME.fullmatch(name) or name.endswith((".", ".tmp")):
                raise InputError(
                    f"expected a plain relative path under {root!r}, got {part[:300]!a}; names are "
                    "of letters a-z, digits and _.=+@,~-, and do not end in . or .tmp"
                )
            names.append(name)
    return "/".join([root.rstrip("/"), *names])


def exists(url: str) -> bool:
    """Whether an object or a directory is at `url`, asked of the store and not of a cache."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.size(path) is not None
    fs.invalidate_cache()
    return fs.exists(path)


def size(url: str) -> int | None:
    """Size in bytes of the object at `url`; None when there is none."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.size(path)
    try:
        return fs.info(path)["size"]
    except FileNotFoundError:
        return None


def modified(url: str) -> float | None:
    """Unix time in seconds at which the store last wrote the object; None when it cannot say."""
    fs, path = filesystem(url)
    try:
        if isinstance(fs, LocalFileSystem):
            return os.stat(path).st_mtime
        return fs.modified(path).timestamp()
    except FileNotFoundError:
        return None
    # What fsspec's stores without such a time raise: no method, no field, or a field without value.
    except (NotImplementedError, KeyError, AttributeError):
        return None


def read_bytes(url: str) -> bytes:
    """The object's content. Raises `FileNotFoundError` when it is not there."""
    fs, path = filesystem(url)
    return local_storage.read(path) if isinstance(fs, LocalFileSystem) else fs.cat_file(path)


def read_json(url: str) -> Any:
    """The object's content as JSON.

    Raises:
        FileNotFoundError: when it is not there.
        ValueError: when it is torn, no JSON, has a field twice, or is nested without end.
    """
    return parse_json(read_bytes(url))


def open_read(url: str) -> IO[bytes]:
    """Open an object for random-access reading."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.with_retries(path, lambda: open(path, "rb"))
    return fs.open(path, "rb")


def open_write(url: str) -> IO[bytes]:
    """Open an object for writing; parent directories are made. Not atomic: for attempt files."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.open_write(path)
    fs.makedirs(os.path.dirname(path), exist_ok=True)
    return fs.open(path, "wb")


def create(url: str, data: bytes, *, durable: bool = True) -> bool:
    """Write `data` at `url` if nothing is there. True when written, False when it existed.

    The content appears whole or not at all, and of any number of racing callers one gets True.

    Args:
        url: where.
        data: the content.
        durable: flush a local disk first, so that a power cut cannot lose what somebody has seen.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.create(path, data, durable)
    if fs.protocol == "memory":
        with _memory_lock:
            if fs.exists(path):
                return False
            fs.pipe_file(path, data)
            return True
    _check_conditional(url)
    return fs.create(path, data)


def read_versioned(url: str) -> tuple[bytes, str]:
    """An object's content and the version `replace_if` compares. Raises `FileNotFoundError`."""
    fs, path = filesystem(url)
    if url.startswith(_BUCKETS):
        # Asked for first: of an object replaced in between, the older version matches nothing.
        about = fs.info(path)
        version = str(about["generation" if url.startswith(_GOOGLE) else "ETag"])
        return fs.cat_file(path), version
    data = read_bytes(url)
    return data, hashlib.sha256(data).hexdigest()


def replace_if(url: str, data: bytes | None, version: str) -> bool:
    """Replace the object by `data`, or delete it (None), while it has the version that was read.

    Returns:
        False when it is another version or gone; then nothing was changed.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.replace_if(path, data, version)
    if fs.protocol != "memory":
        _check_conditional(url)
        return fs.replace_if(path, data, version)
    with _memory_lock:
        if not fs.exists(path) or hashlib.sha256(fs.cat_file(path)).hexdigest() != version:
            return False
        if data is None:
            fs.rm_file(path)
        else:
            fs.pipe_file(path, data)
        return True


def _check_conditional(url: str) -> None:
    if not url.startswith(_BUCKETS):
        raise StorageError(
            f"{url}: this store has no conditional write, which publishing an output needs; "
            "use a local path, gs:// or s3://"
        )


def write_atomic(url: str, data: bytes, *, durable: bool = True) -> None:
    """Replace the object at `url` by `data`; a reader sees all of the old or all of the new."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        local_storage.replace(path, data, durable)
    else:
        fs.pipe_file(path, data)


def list_names(url: str) -> list[str]:
    """Sorted names directly under a directory; empty when there is no such directory.

    Another writer's unfinished `create` or `write_atomic` is not among them.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return sorted(n for n in local_storage.list_names(path) if not _TEMPORARY.fullmatch(n))
    fs.invalidate_cache()
    try:
        found = fs.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})


def list_files(url: str) -> Iterator[tuple[str, int]]:
    """(path relative to `url`, size in bytes) of every object under `url`, sorted by path.

    Raises:
        InputError: for a symbolic link, a pipe or a device: what it holds is not under `url`, so
            it can be neither recorded nor kept.
    """
    fs, path = filesystem(url)
    prefix = path.rstrip("/") + "/"
    if isinstance(fs, LocalFileSystem):
        # fsspec leaves out what it cannot list: a shard would lose files unnoticed.
        found = local_storage.walk(path)
    else:
        fs.invalidate_cache()
        try:
            found = {name: info["size"] for name, info in fs.find(path, detail=True).items()}
        except FileNotFoundError:
            return
    for name, length in sorted(found.items()):
        # Another writer's unfinished `create` or `write_atomic`.
        if not _TEMPORARY.fullmatch(name):
            yield name.removeprefix(prefix), length


def inventory(url: str) -> dict[str, tuple[int, float | None]]:
    """Bytes and Unix time of the last write of everything under `url`, by path relative to it.

    Unlike `list_files` it takes anything: a link is an entry, and so is an empty directory. Another
    writer's unfinished `create` or `write_atomic` is none.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        found = local_storage.inventory(path)
    else:
        fs.invalidate_cache()
        try:
            objects = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
        found = {name: (info["size"], _written(info)) for name, info in objects.items()}
    prefix = path.rstrip("/") + "/"
    return {
        name.removeprefix(prefix): entry
        for name, entry in found.items()
        if not _TEMPORARY.fullmatch(name)
    }


def _written(info: Mapping[str, Any]) -> float | None:
    time = info.get("mtime") or info.get("created") or info.get("LastModified")
    return time.timestamp() if isinstance(time, datetime.datetime) else None


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
    if isinstance(fs, LocalFileSystem):
        local_storage.remove(path)
        return
    try:
        if has_magic(path):
            for name in [*fs.find(path)]:  # rm would take the path for a pattern
                fs.rm_file(name)
        else:
            fs.rm(path, recursive=True)
    except FileNotFoundError:
        return
