"""Garbage collection: find and delete the data in a store that is not protected.

An output that is not protected is deleted as a whole; of a protected one, the paths that
`left_overs` returns. Both are judged again when they are deleted, under the output's lease and,
for whole outputs, while no reader begins (see `lease.collecting`). Event logs and reports stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.errors import PonenteError
from pipeline.store import lease, manifest, process, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import age_of
from pipeline.store.left_overs import Tree, unneeded
from pipeline.store.manifest import Manifest
from pipeline.store.outputs import Store, Wanted, forget_missing
from pipeline.store.parallel import by_item, concurrently
from pipeline.store.protection import Keep, Protection, protection
from pipeline.store.shards import ATTEMPTS

_PRESETS_ONLY = Keep(recorded=False)
_ENTRIES = 500_000  # of outputs that are listed once; those of more are listed again
_OURS = {manifest.NAME, LEDGER, lease.DIRECTORY, ATTEMPTS}


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted: the output at `root`, or the file or directory `url` in it.

    Attributes:
        size: in bytes.
        age: seconds since its newest file was written; None when the store has no such time.
        cost: seconds that the build took; None without a manifest.
        asked: what was to be kept, for judging again: names of directories, and `Keep`.
    """

    url: str
    root: str
    size: int
    why: str
    age: float | None = None
    cost: float | None = None
    asked: tuple[frozenset[str], Keep] = field(default=(frozenset(), _PRESETS_ONLY), repr=False)

    @property
    def whole(self) -> bool:
        return self.url == self.root


@dataclass
class GarbageReport:
    """The garbage, and one line per directory that is left alone."""

    garbage: list[Garbage] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def find_garbage(
    store: Store, nodes: Iterable[Wanted], keep: Keep = _PRESETS_ONLY
) -> GarbageReport:
    """The data that can be deleted from the store: what is not protected (see `protection`).

    An output whose owner is unresponsive is garbage, and so is what it reads: `delete` watches
    first.
    """
    asked = (frozenset(node.directory for node in nodes), keep)
    trees: dict[str, Tree] = {}
    room = _ENTRIES

    def holder(root: str) -> lease.Holder | None:
        nonlocal room
        tree = Tree(root)
        if room >= len(tree.entries):
            room -= len(tree.entries)
            trees[root] = tree
        return lease.holder(root, tree.names(lease.DIRECTORY))

    seen = by_item(holder, _roots(store), store.prefix)
    holders = {root: found for root, found in seen.items() if found and found.responsive}
    protected = protection(store, *asked, [holder.owner for holder in holders.values()])
    now = functools.cache(functools.partial(process.now, store.prefix))

    def judge(name: str) -> GarbageReport:
        root = storage.join(store.prefix, name)
        tree, published = trees.pop(root, None) or Tree(root), protected.published[name]
        if not _OURS & set(tree.names()):
            return GarbageReport(left=[f"{root}: not an output of ours"])
        if root in holders:
            return GarbageReport(left=[f"{root}: being built by {holders[root]}"])
        if name not in protected.outputs:
            by = "preset or recorded run" if keep.recorded else "preset"
            paths, why, cost = [""], f"no {by} needs it", published.seconds
        else:
            try:
                found = published.manifest or manifest.load(root)
                paths = _left_overs(tree, found, protected)
            except PonenteError as error:
                return GarbageReport(left=[str(error)])
            why, cost = "left by an attempt that lost or was replaced", None
        judged = GarbageReport()
        for path in paths:
            size, newest = tree.measure(path)
            age = max(0.0, now() - newest) if newest else None
            url = f"{root}/{path}" if path else root
            if age is None or age >= keep.younger_than:
                judged.garbage.append(Garbage(url, root, size, why, age, cost, asked))
        return judged

    report = GarbageReport()
    for found in concurrently(judge, protected.published, store.prefix):
        report.garbage += found.garbage
        report.left += found.left
    return report


def _roots(store: Store) -> list[str]:
    return [storage.join(store.prefix, name) for name in store.outputs()]


def _left_overs(
    tree: Tree, published: Manifest | None, protected: Protection, before: int | None = None
) -> list[str]:
    name = tree.root.rpartition("/")[2]
    return unneeded(
        tree,
        published,
        lambda attempt: before is None or age_of(attempt)[0] < before,
        lambda old: protected.covers(name, old),
        thorough=True,
    )


def delete(store: Store, garbage: Iterable[Garbage], *, wait: float = 0.0) -> tuple[int, list[str]]:
    """Delete what `find_garbage` found, unless it is protected by now.

    Leases whose owners may be dead are watched for `wait` seconds. Returns (bytes deleted, one line
    per output that is left).
    """
    by_root: dict[str, list[Garbage]] = {}
    for item in garbage:
        by_root.setdefault(item.root, []).append(item)
    if not by_root:
        return 0, []
    asked = next(iter(by_root.values()))[0].asked
    watch = lease.Watch()
    watch.held(_roots(store), wait=wait)
    whole = [root for root, items in by_root.items() if any(item.whole for item in items)]
    with lease.collecting(store.prefix) as collector:
        live = watch.held(_roots(store))
        protected = protection(store, *asked, [watch.owner(root) for root in live])

        def withdraw(root: str) -> str:
            if root.rpartition("/")[2] in protected.outputs:
                return f"{root}: needed by now; left"
            held = None if root in live or not collector.newest() else watch.take(root)
            if held is None:
                return f"{root}: being built; left"
            # The manifest goes first, so that no reader finds one whose files are gone.
            storage.delete_tree(storage.join(root, manifest.NAME))
            held.release()
            return ""

        withdrawn = by_item(withdraw, whole, store.prefix)

    def clear(root: str) -> tuple[int, str]:
        line = withdrawn.get(root, "")
        held = None if line or not watch.look(root) else watch.take(root)
        if held is None:
            return 0, line or f"{root}: being built; left"
        if root in withdrawn:
            return _delete_whole(root, held, by_root[root])
        return _delete_parts(root, held, by_root[root], protected), ""

    cleared = concurrently(clear, by_root, store.prefix)
    forget_missing(store.prefix)
    return sum(freed for freed, _ in cleared), [line for _, line in cleared if line]


def _delete_whole(root: str, held: lease.Lease, items: list[Garbage]) -> tuple[int, str]:
    for name in storage.list_names(root):
        if name == manifest.NAME or not held.newest():
            held.release()
            return 0, f"{root}: built again meanwhile; left"
        if name != lease.DIRECTORY:
            storage.delete_tree(storage.join(root, name))
    held.stop()
    storage.delete_tree(root)
    return max(1, sum(item.size for item in items if item.whole)), ""


def _delete_parts(root: str, held: lease.Lease, items: list[Garbage], protected: Protection) -> int:
    freed = 0
    try:
        # Listed again: a build may have ended since.
        paths = _left_overs(Tree(root), manifest.load(root), protected, held.number)
        still = {f"{root}/{path}" for path in paths}
        for item in items:
            if item.url in still and held.newest():
                storage.delete_tree(item.url)
                freed += item.size
    finally:
        held.release()
    return freed
