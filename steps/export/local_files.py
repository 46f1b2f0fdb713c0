"""Files of a store where libraries that know no store want a path."""

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
    """A path with the files of the URL `folder`: its own on a disk, else a copy that is deleted."""
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
    """A path to write the file `url` at; in a bucket it is stored on leaving without an error."""
    if storage.is_local(url):
        path = storage.local_path(url)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, url.rpartition("/")[2])
        yield path
        with open(path, "rb") as source, storage.open_write(url) as to:
            shutil.copyfileobj(source, to, _PIECE)
