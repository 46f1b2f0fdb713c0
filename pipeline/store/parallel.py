"""Reading many small objects of a store at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
