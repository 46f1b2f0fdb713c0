"""Asking a store about many objects at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pipeline.store import storage

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 16  # requests of one caller at a time


def concurrently(function: Callable[[T], R], items: Iterable[T], *, local: bool) -> list[R]:
    """`[function(item) for item in items]`; on a remote store, sixteen at a time.

    Args:
        function: reads from a store; the first error is raised.
        items: its arguments.
        local: whether the store is a disk of this machine, where threads gain nothing.
    """
    todo = list(items)
    if local or len(todo) < 2:
        return [function(item) for item in todo]
    with ThreadPoolExecutor(min(_THREADS, len(todo)), "storage") as pool:
        return list(pool.map(function, todo))


def list_together(home: str, directories: Collection[str]) -> dict[str, int]:
    """Sizes by path below `home` of all that is under these directories, by one listing.

    What stands beside them is in it too. It may lag behind: what it seems to lack is to be asked
    for.

    Args:
        home: URL.
        directories: relative to it.
    """
    if not directories:
        return {}
    several = len(set(directories)) > 1
    top = os.path.commonpath(directories) if several else next(iter(directories))
    return {f"{top}/{name}": size for name, size in storage.list_files(storage.join(home, top))}
