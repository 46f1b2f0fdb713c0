"""Check that a store can be read and written, before any work starts."""

from __future__ import annotations

import uuid

from pipeline.errors import StorageError
from pipeline.store import local_storage, storage

_CHECK_SECONDS = 1.0


def check_writable(prefix: str) -> None:
    """Write, read, list and delete a small object under `prefix`, with a deadline of a second.

    Raises:
        InputError: when `prefix` is a file, is not writable, or its bucket does not exist.
        StorageError: when the store refuses for another reason, such as a quota.
    """
    name = f"write-check-{uuid.uuid4().hex}"
    url = storage.join(prefix, name)
    if storage.is_local(url):
        local_storage.check_writable(storage.local_path(prefix), name)
        return
    fs, path = storage.filesystem(url, _CHECK_SECONDS)
    fs.pipe_file(path, b"ponente")
    found = fs.cat_file(path)
    fs.ls(path.rpartition("/")[0], detail=False)
    fs.rm_file(path)
    if found != b"ponente":
        raise StorageError(f"{url}: read back {found!r} after writing b'ponente'")
