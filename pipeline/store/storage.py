"""Access to storage: every read and write of the engine goes through this module, by fsspec.

A location is a URL string (`./runs/x`, `/abs/x`, `gs://bucket/x`, `s3://bucket/x`, `memory://x`).
The commit protocol needs three operations:

- `create` writes an object only if none exists, with all of its content or not at all: by a hard
  link of a finished temporary file on a local disk, by a precondition (`ifGenerationMatch=0`,
  `If-None-Match: *`) on GCS and S3.
- `replace_if` replaces or deletes an object only while it is the version that was read: the
  generation must match on GCS, the ETag on S3; a local disk compares under a file lock.
- `write_atomic` replaces an object; readers see the old bytes or the new, never a mixture.

No operation renames a directory: object stores cannot.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import IO, Any

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import InputError
from pipeline.store import local_storage
from pipeline.store.decode import parse_json
from pipeline.store.object_storage import Bucket, Memory, Objects

_give_up_after: ContextVar[float | None] = ContextVar("give_up_after", default=None)
_GOOGLE = ("gs://", "gcs://")
_BUCKETS = (*_GOOGLE, "s3://")
_STORES = ("gs", "gcs", "s3", "memory")
_LOCAL = LocalFileSystem()
with_local_retries = local_storage.with_retries  # for code that opens local files itself
# No character that is special in a shell, a URL, a glob or fsspec's chained URLs, and no two
# characters that look alike.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.=+@,~][A-Za-z0-9_.=+@,~-]{0,254}")


def filesystem(url: str, give_up_after: float | None = None) -> tuple[Any, str]:
    """The fsspec filesystem of `url` and the path inside it.

    A request to a bucket takes `give_up_after` seconds at most, with its retries.
    """
    if url.startswith(_BUCKETS):
        # No listings cache: it would lack objects that other processes wrote since.
        limit = _give_up_after.get() if give_up_after is None else give_up_after
        options = {} if limit is None else {"give_up_after": limit}
        fs = _bucket_class(url)(use_listings_cache=False, **options)
        return fs, url.partition("://")[2].rstrip("/")
    if "://" not in url:
        return _LOCAL, os.path.abspath(os.path.expanduser(url))
    # Typed as Any: fsspec's annotations allow text where this module uses bytes only.
    return url_to_fs(url)


def _bucket_class(url: str) -> Any:  # imports here, because the clients take a second to import
    if url.startswith(_GOOGLE):
        from pipeline.store.google_storage import GoogleStorage as Client
    else:
        from pipeline.store.s3_storage import S3Storage as Client
    return Client


@contextlib.contextmanager
def giving_up_after(seconds: float) -> Iterator[None]:
    """Within the block, a request of this thread takes `seconds` at most, with its retries."""
    token = _give_up_after.set(seconds)
    try:
        yield
    finally:
        _give_up_after.reset(token)


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    if not is_local(url):
        raise InputError(f"expected a path on this machine, got {url!r}")
    return filesystem(url)[1]


def normalise(url: str) -> str:
    """`url` with a local path made absolute, gs:// for gcs://, and no trailing slash.

    Raises `InputError` for anything but a path or a URL of a supported store; nothing is accessed.
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
        return f"{scheme}:// has no conditional write known to ponente, which publishing needs"
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        return f"{error} (pip install 'ponente[{scheme}]')"
    names = path.rstrip("/").split("/")
    if not names[0] or any(name in ("", ".", "..") or set(name) & set("*?[]#\\") for name in names):
        return "no bucket, an empty or dotted part, or one of *?[]#\\ in it"
    return ""


def join(root: str, *parts: str) -> str:
    """`root` extended by relative `parts`, of names that every store and tool reads alike."""
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


def _at(url: str) -> Any:
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return local_storage.Disk(path)
    if url.startswith(_BUCKETS):
        return Bucket(fs, path)
    return (Memory if fs.protocol == "memory" else Objects)(fs, path)


def exists(url: str) -> bool:
    """Whether an object or a directory exists at `url`; never answered from a cache."""
    return _at(url).exists()


def size(url: str) -> int | None:
    return _at(url).size()


def modified(url: str) -> float | None:
    """Unix time in seconds of the object's last write; None without the object or such a time."""
    return _at(url).modified()


def read_bytes(url: str) -> bytes:
    return _at(url).read()


def read_json(url: str) -> Any:
    return parse_json(read_bytes(url))


def open_read(url: str) -> IO[bytes]:
    return _at(url).open_read()


def open_write(url: str) -> IO[bytes]:
    """Open an object for writing; makes its directories. Not atomic: for files of an attempt."""
    return _at(url).open_write()


def create(url: str, data: bytes, *, durable: bool = True) -> bool:
    """Write `data` at `url` if no object exists. True when written, False when one existed.

    With `durable`, a local disk is synced before the object appears, so that a power failure cannot
    lose an object that another process has read.
    """
    return _at(url).create(data, durable)


def read_versioned(url: str) -> tuple[bytes, str]:
    """An object's content and the version `replace_if` compares. Raises `FileNotFoundError`."""
    return _at(url).read_versioned()


def replace_if(url: str, data: bytes | None, version: str) -> bool:
    """Replace the object by `data`, or delete it (None), if it still has this version.

    Returns False when it has another version or does not exist; nothing was changed then.
    """
    return _at(url).replace_if(data, version)


def write_atomic(url: str, data: bytes, *, durable: bool = True) -> None:
    """Replace the object at `url` by `data`; readers see all of the old bytes or of the new."""
    _at(url).replace(data, durable)


def list_names(url: str) -> list[str]:
    """Sorted names directly under a directory; empty when there is no such directory.

    Leaves out the temporary files of another writer's unfinished `create` or `write_atomic`.
    """
    return sorted(_at(url).list_names())


def entries(url: str) -> dict[str, float]:
    """Name -> Unix time of the last write (0 if unknown) of what is directly under a directory."""
    return _at(url).entries()


def list_files(url: str) -> Iterator[tuple[str, int]]:
    """(path relative to `url`, size in bytes) of every object under `url`, sorted by path.

    Raises `InputError` for a symbolic link, a pipe or a device: its data is not under `url`.
    """
    place = _at(url)
    prefix = place.path.rstrip("/") + "/"
    for name, length in sorted(place.files().items()):
        if not local_storage.TEMPORARY.fullmatch(name):  # an unfinished `create` or `write_atomic`
            yield name.removeprefix(prefix), length


def inventory(url: str) -> dict[str, tuple[int, float | None]]:
    """Path relative to `url` -> (bytes, Unix time of the last write) of everything under it.

    Unlike `list_files` it includes links, empty directories, and temporary files that a `create` or
    `write_atomic` left behind `local_storage.ABANDONED_SECONDS` ago.
    """
    place = _at(url)
    prefix = place.path.rstrip("/") + "/"
    return {name.removeprefix(prefix): entry for name, entry in place.inventory().items()}


def delete_tree(url: str) -> None:
    _at(url).remove()
