"""Concurrent requests to a store."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.store import storage

T = TypeVar("T")
R = TypeVar("R")
_THREADS = 16  # concurrent requests of one caller


def concurrently(function: Callable[[T], R], items: Iterable[T], at: str) -> list[R]:
    """`[function(item) for item in items]`; on a remote store, sixteen at a time.

    `at` is a URL in the store; on a disk threads are no faster.
    """
    return list(in_order(function, items, at))


def by_item(function: Callable[[T], R], items: Iterable[T], at: str) -> dict[T, R]:
    items = list(items)
    return dict(zip(items, in_order(function, items, at), strict=True))


def in_order(function: Callable[[T], R], items: Iterable[T], at: str) -> Iterator[R]:
    """As `concurrently`, one result after the other: at most 32 wait to be taken."""
    todo = list(items)
    if storage.is_local(at) or len(todo) < 2:
        yield from map(function, todo)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(min(_THREADS, len(todo)), "storage") as pool:
        try:
            for item in todo:
                if len(waiting) == 2 * _THREADS:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def list_together(home: str, directories: Collection[str]) -> dict[str, int]:
    """Sizes by path below `home` of all files under these directories, by one listing."""
    if not directories:
        return {}
    several = len(set(directories)) > 1
    top = os.path.commonpath(directories) if several else next(iter(directories))
    return {f"{top}/{name}": size for name, size in storage.list_files(storage.join(home, top))}
