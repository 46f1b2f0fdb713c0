"""Finding and deleting what no named experiment reaches.

Kept are the outputs of every step of the graphs given, finished or not, and the outputs those
refer to. Deleted, when asked, are other outputs, data of attempts that lost or were replaced, and
index entries that lead nowhere. Event logs and reports stay. An output's manifest goes first, so
that nobody takes a half-deleted one for whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import PonenteError
from pipeline.graph.node import Node
from pipeline.store import lease, manifest, storage, tidy
from pipeline.store.outputs import Store, forget_missing


@dataclass(frozen=True)
class Garbage:
    """Something to delete: its URL, its size in bytes, and why nobody needs it."""

    url: str
    size: int
    why: str


def find_garbage(store: Store, nodes: Iterable[Node]) -> list[Garbage]:
    """What could be deleted from the store, given all nodes that must stay."""
    kept = _with_origins(store, {node.directory for node in nodes})
    found = []
    for name in store.outputs():
        path = storage.join(store.prefix, name)
        if name not in kept:
            if lease.holder(path) is None:
                found.append(Garbage(path, _size(path), "no named experiment reaches it"))
            continue
        found += [
            Garbage(url, _size(url), "left by an attempt that lost or was replaced")
            for url in tidy.unreferenced(path, keep_retired=False)
        ]
    return found


def delete(store: Store, garbage: Iterable[Garbage]) -> int:
    """Delete the garbage; returns how many bytes it was."""
    freed = 0
    for item in garbage:
        if storage.exists(storage.join(item.url, manifest.NAME)):
            storage.delete_tree(storage.join(item.url, manifest.NAME))
        storage.delete_tree(item.url)
        freed += item.size
    forget_missing(store.prefix)
    return freed


def _with_origins(store: Store, directories: set[str]) -> set[str]:
    kept = set(directories)
    for name in directories:
        try:
            published = manifest.load(storage.join(store.prefix, name))
        except PonenteError:
            continue
        if published is not None and published.origin is not None:
            kept.add(published.origin.directory)
    return kept


def _size(url: str) -> int:
    if not storage.is_local(url):
        return sum(size for _, size in storage.list_files(url)) or (storage.size(url) or 0)
    # Not `list_files`, which refuses a link: what is no output may hold anything, and goes.
    walked = os.walk(storage.local_path(url))
    found = [os.path.join(folder, name) for folder, _, names in walked for name in names]
    return sum(os.lstat(path).st_size for path in found) or (storage.size(url) or 0)
