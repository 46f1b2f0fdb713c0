"""Local paths of files in a store, for libraries that need a path."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from pipeline.store import storage

_PIECE = 1 << 24  # bytes copied at once


@contextlib.contextmanager
def read_locally(folder: str) -> Iterator[str]:
    """A path with the files of the URL `folder`: its own on a disk, else a temporary copy."""
    if storage.is_local(folder):
        yield storage.local_path(folder)
        return
    with tempfile.TemporaryDirectory() as copy:
        for name, _ in storage.list_files(folder):
            path = os.path.join(copy, *name.split("/"))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with storage.open_read(storage.join(folder, name)) as source, open(path, "wb") as to:
                shutil.copyfileobj(source, to, _PIECE)
        yield copy


@contextlib.contextmanager
def write_locally(url: str) -> Iterator[str]:
    """A temporary path whose file is renamed or uploaded to `url` when the context exits.

    An error leaves no file behind.
    """
    local = storage.is_local(url)
    path = storage.local_path(url) if local else url
    above, _, name = path.rpartition("/")
    if local:
        os.makedirs(above, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above if local else None) as folder:
        written = os.path.join(folder, name)
        yield written
        if local:
            os.replace(written, path)
            return
        with open(written, "rb") as source, storage.open_write(url) as to:
            shutil.copyfileobj(source, to, _PIECE)
