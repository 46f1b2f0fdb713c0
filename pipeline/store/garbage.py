"""Garbage collection: find and delete the data in a store that no experiment needs.

An output that is not kept is deleted as a whole; of a kept output, the paths that `left_overs`
returns. Both are deleted only under the output's lease. Event logs and reports stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.errors import PonenteError
from pipeline.store import lease, manifest, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import age_of
from pipeline.store.left_overs import Tree, unneeded
from pipeline.store.manifest import Manifest
from pipeline.store.outputs import Store, Wanted, forget_missing, is_output_name
from pipeline.store.parallel import concurrently
from pipeline.store.run_summary import recorded
from pipeline.store.shards import ATTEMPTS

_OURS = {manifest.NAME, LEDGER, lease.DIRECTORY, ATTEMPTS}


@dataclass(frozen=True)
class Keep:
    """What `gc` keeps in addition to the outputs of the given graphs.

    Attributes:
        recorded: outputs of every run in the store's event logs.
        younger_than: data written in the last so many seconds.
        names: step names, or beginnings of directory names.
    """

    recorded: bool = True
    younger_than: float = 0.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted.

    Attributes:
        url: URL of the file or directory.
        root: URL of the output that it is, or is part of.
        size: in bytes.
        why: why it is not needed.
        age: seconds since its newest file was written; None when the store has no such time.
        cost: seconds that the build took; None without a manifest.
    """

    url: str
    root: str
    size: int
    why: str
    age: float | None = None
    cost: float | None = None


@dataclass
class Report:
    """The result of `find_garbage`: the garbage, and one line per directory that is left alone."""

    garbage: list[Garbage] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Outputs:
    """The manifests of a store by directory; None where nothing is published, or the read error."""

    store: Store
    manifests: Mapping[str, Manifest | PonenteError | None]

    @classmethod
    def of(cls, store: Store) -> _Outputs:
        names = store.outputs()
        paths = [storage.join(store.prefix, name) for name in names]
        found = concurrently(_load, paths, local=storage.is_local(store.prefix))
        return cls(store, dict(zip(names, found, strict=True)))

    def sound(self, name: str) -> Manifest | None:
        found = self.manifests.get(name)
        return found if isinstance(found, Manifest) else None

    def references(self) -> dict[str, frozenset[str]]:
        """URL of an output's directory -> paths in it that other outputs refer to."""
        found: dict[str, frozenset[str]] = {}
        for name in self.manifests:
            m = self.sound(name)
            if m is not None and m.origin is not None:
                home = m.home(storage.join(self.store.prefix, name))
                found[home] = found.get(home, frozenset()) | m.named_paths()
        return found

    def with_origins(self, directories: Iterable[str]) -> set[str]:
        """The directories, and those of the outputs that they refer to, transitively."""
        kept, left = set(), list(directories)
        while left:
            name = left.pop()
            if name not in kept and is_output_name(name):
                kept.add(name)
                m = self.sound(name)
                left += [m.origin.directory] if m is not None and m.origin is not None else []
        return kept


def _load(path: str) -> Manifest | PonenteError | None:
    try:
        return manifest.load(path)
    except PonenteError as error:
        return error


def find_garbage(
    store: Store, nodes: Iterable[Wanted], keep: Keep = Keep(recorded=False)
) -> Report:
    """The data that can be deleted from the store: all but the nodes' outputs and those of `keep`.

    Also kept are the outputs that kept ones refer to, and every output that is being built. An
    output whose owner is unresponsive is garbage: `delete` watches the lease before it takes it.
    """
    reached = {node.directory for node in nodes}
    if keep.recorded:
        reached |= recorded(store.prefix)
    outputs = _Outputs.of(store)
    reached |= {n for n in outputs.manifests if any(_means(word, n) for word in keep.names)}
    reached = outputs.with_origins(reached)
    report, now, references = Report(), time.time(), outputs.references()
    paths = [storage.join(store.prefix, name) for name in outputs.manifests]
    for tree in concurrently(Tree, paths, local=storage.is_local(store.prefix)):
        path, name = tree.root, tree.root.rpartition("/")[2]
        published = outputs.manifests[name]
        if not _OURS & set(tree.names()):
            report.left.append(f"{path}: not an output of ours")
        elif (
            holder := lease.holder(path, tree.names(lease.DIRECTORY))
        ) is not None and holder.responsive:
            report.left.append(f"{path}: being built by {holder}")
        elif name not in reached:
            why = "no preset or recorded run needs it" if keep.recorded else "no preset needs it"
            cost = published.seconds if isinstance(published, Manifest) else None
            report.garbage.append(_garbage(tree, "", why, now, cost))
        elif isinstance(published, PonenteError):
            report.left.append(str(published))
        else:
            report.garbage += _left_overs(
                tree, published, now, report, references.get(path, frozenset())
            )
    report.garbage = [g for g in report.garbage if g.age is None or g.age >= keep.younger_than]
    return report


def _left_overs(
    tree: Tree, published: Manifest | None, now: float, report: Report, referenced: frozenset[str]
) -> list[Garbage]:
    try:
        paths = unneeded(
            tree,
            published,
            lambda _: True,
            keep_retired=False,
            thorough=True,
            referenced=referenced,
        )
    except PonenteError as error:
        report.left.append(str(error))
        return []
    why = "left by an attempt that lost or was replaced"
    return [_garbage(tree, path, why, now) for path in paths]


def _garbage(tree: Tree, path: str, why: str, now: float, cost: float | None = None) -> Garbage:
    size, newest = tree.measure(path)
    age = max(0.0, now - newest) if newest else None
    return Garbage(
        storage.join(tree.root, path) if path else tree.root, tree.root, size, why, age, cost
    )


def delete(store: Store, garbage: Iterable[Garbage], *, wait: float = 0.0) -> tuple[int, list[str]]:
    """Delete garbage, that of each output under its lease.

    Args:
        store: the store.
        garbage: from `find_garbage`.
        wait: seconds to watch leases whose owners may be dead.

    Returns:
        (bytes deleted, one line per output that is left because it is being built).
    """
    by_root: dict[str, list[Garbage]] = {}
    for item in garbage:
        by_root.setdefault(item.root, []).append(item)
    held, references = lease.acquire_free(by_root, wait=wait), _Outputs.of(store).references()
    freed, left = 0, [f"{root}: being built; left" for root in by_root if root not in held]
    for root, mine in held.items():
        referenced = references.get(root, frozenset())
        freed += _delete_whole(mine, by_root[root]) or _delete_parts(
            root, mine, by_root[root], referenced
        )
    forget_missing(store.prefix)
    return freed, left


def _delete_whole(held: lease.Lease, items: list[Garbage]) -> int:
    """Delete an output; its manifest first, so that no reader finds one whose files are gone."""
    whole = next((item for item in items if item.url == item.root), None)
    if whole is None:
        return 0
    for name in sorted(storage.list_names(whole.url), key=lambda name: name != manifest.NAME):
        if name != lease.DIRECTORY and held.newest():
            storage.delete_tree(storage.join(whole.url, name))
    if held.newest():
        held.stop()
        storage.delete_tree(whole.url)
        return max(1, whole.size)
    held.release()
    return 0


def _delete_parts(
    root: str, held: lease.Lease, items: list[Garbage], referenced: frozenset[str]
) -> int:
    def older(attempt: str) -> bool:
        return age_of(attempt)[0] < held.number

    freed = 0
    try:
        # Listed again: a build may have ended since.
        published = manifest.load(root)
        still = unneeded(
            Tree(root), published, older, keep_retired=False, thorough=True, referenced=referenced
        )
        still = {storage.join(root, path) for path in still}
        for item in items:
            if item.url in still and held.newest():
                storage.delete_tree(item.url)
                freed += item.size
    finally:
        held.release()
    return freed


def _means(word: str, name: str) -> bool:
    return name.rpartition("-")[0] == word or name.startswith(word)
