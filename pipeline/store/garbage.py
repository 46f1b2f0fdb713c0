"""What a store holds that is not needed, and deleting it: after a build, and by `gc`.

Deleted is only what is provably ours, and only under the output's lease: outputs that are not
kept, and in the others the data of attempts that lost or were replaced. An attempt's number is that
of its lease, so the owner of lease n touches nothing of a later build, even if it was paused
meanwhile. Event logs and reports stay.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

from pipeline.errors import PonenteError
from pipeline.store import lease, manifest, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger, age_of
from pipeline.store.manifest import ATTEMPTS, FAILURE, KEEP, RETIRED, Manifest
from pipeline.store.outputs import Store, Wanted, forget_missing, is_output_name
from pipeline.store.parallel import concurrently

_KEPT_OF_AN_ATTEMPT = ("log.txt", "logs", FAILURE, KEEP)
_OURS = {manifest.NAME, LEDGER, lease.DIRECTORY, ATTEMPTS}
_RUN_STARTED = b'"run_started"'
_FIRST_LINES = 3  # of an event log, among which is the start of the run


@dataclass(frozen=True)
class Keep:
    """What `gc` keeps beside the outputs of the graphs it is given.

    Attributes:
        recorded: outputs of every run in the store's event logs.
        younger_than: seconds; what was written since then.
        names: steps, or directories by their beginning.
    """

    recorded: bool = True
    younger_than: float = 0.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted.

    Attributes:
        url: what.
        root: the output it is, or is part of.
        size: in bytes.
        why: it is not needed.
        age: seconds since its newest file was written; None when the store does not say.
        cost: seconds that the build took, where a manifest says so.
    """

    url: str
    root: str
    size: int
    why: str
    age: float | None = None
    cost: float | None = None


@dataclass
class Report:
    """What `gc` found: garbage, and a line for each thing that it leaves alone."""

    garbage: list[Garbage] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def tidy(root: str, held: lease.Lease, attempt: str, *, lost: bool) -> None:
    """Delete what no manifest needs after a build; logs and files in `keep/` stay.

    Args:
        root: the step's directory.
        held: the builder's lease; once another process has taken over, only data of the builder's
            own attempt is deleted.
        attempt: the builder's.
        lost: another attempt published, perhaps without shards that this one had recorded.
    """
    number = held.number if held.newest() else None

    def mine(name: str) -> bool:
        return name == attempt or (number is not None and age_of(name)[0] <= number)

    for url in unneeded(root, mine, thorough=lost):
        storage.delete_tree(url)


def unneeded(
    root: str,
    mine: Callable[[str], bool],
    *,
    keep_retired: bool = True,
    thorough: bool = False,
    referenced: Set[str] = frozenset(),
) -> list[str]:
    """URLs in the step's directory that no manifest needs, in the order to delete them.

    Nothing while nothing is published, and nothing of an unfinished rebuild: its shards are worth
    resuming from.

    Args:
        root: the step's directory.
        mine: which attempts to look at, by name.
        keep_retired: count manifests that a rebuild replaced; a reader may have them open.
        thorough: look at every ledger record, even when there is one ledger only.
        referenced: roots of shards that other outputs refer to; the manifests that have them stay.
    """
    published = manifest.load(root)
    if published is None:
        return []
    retired = {
        url: m
        for url, m in _retired(root).items()
        if keep_retired or (m and not referenced.isdisjoint(s.root for s in m.shards))
    }
    kept = {s.root for m in (published, *retired.values()) if m for s in m.shards}
    gone = (
        [] if keep_retired else sorted(set(_children(storage.join(root, RETIRED))) - set(retired))
    )
    generations = storage.list_names(storage.join(root, LEDGER))
    for generation in generations if thorough or len(generations) > 1 else ():
        ledger = Ledger(root, generation)
        names = {shard.name for shard in published.shards}
        if len(generations) == 1 and ledger.shard_names() <= names:
            continue  # the ledger of what is published, and nothing else in it
        shards = ledger.finished()
        if _resumable(shards.values(), kept, published.attempt):
            kept |= {shard.root for shard in shards.values()}
            continue
        gone += [
            ledger.record(name)
            for name, shard in shards.items()
            if shard.root not in kept and mine(shard.attempt)
        ]
    for attempt in filter(mine, storage.list_names(storage.join(root, ATTEMPTS))):
        gone += _of_attempt(root, attempt, kept)
    return gone


def _resumable(shards: Iterable[manifest.Shard], kept: set[str], published: str) -> bool:
    """Whether these are shards of a rebuild that began after what is published."""
    shards = list(shards)
    return not any(shard.root in kept for shard in shards) and any(
        age_of(shard.attempt) > age_of(published) for shard in shards
    )


def _of_attempt(root: str, attempt: str, kept: set[str]) -> Iterator[str]:
    inside = f"{ATTEMPTS}/{attempt}/"
    used = [path for path in kept if f"{path}/".startswith(inside)]
    for name in storage.list_names(storage.join(root, ATTEMPTS, attempt)):
        if name in _KEPT_OF_AN_ATTEMPT:
            continue
        part = f"{inside}{name}"
        below = [path for path in used if path.startswith(f"{part}/")]
        if any(f"{part}/".startswith(f"{path}/") for path in used):
            continue
        if not below:
            yield storage.join(root, part)
        else:
            for path, _ in storage.list_files(storage.join(root, part)):
                # Files of shards that were cut off, or that lost a race.
                if not any(f"{part}/{path}".startswith(f"{shard}/") for shard in below):
                    yield storage.join(root, part, path)


def _retired(root: str) -> dict[str, Manifest | None]:
    """Manifests of this step that a rebuild replaced, by URL; None for one that is corrupt."""
    found: dict[str, Manifest | None] = {}
    for url in _children(storage.join(root, RETIRED)):
        try:
            found[url] = manifest.parse(url)
        except PonenteError:
            found[url] = None
    return found


def _references(store: Store) -> dict[str, frozenset[str]]:
    """Directory -> roots of the shards in it that other outputs of the store refer to."""
    paths = [storage.join(store.prefix, name) for name in store.outputs()]
    found: dict[str, frozenset[str]] = {}
    for path, m in zip(
        paths, concurrently(_load_sound, paths, local=storage.is_local(store.prefix)), strict=True
    ):
        if m is not None and m.origin is not None:
            home = m.home(path)
            found[home] = found.get(home, frozenset()) | {shard.root for shard in m.shards}
    return found


def _load_sound(path: str) -> Manifest | None:
    try:
        return manifest.load(path)
    except PonenteError:
        return None


def _children(directory: str) -> list[str]:
    return [storage.join(directory, name) for name in storage.list_names(directory)]


def find_garbage(
    store: Store, nodes: Iterable[Wanted], keep: Keep = Keep(recorded=False)
) -> Report:
    """What could be deleted from the store: all but the nodes' outputs and what else is to stay.

    Kept are also the outputs that kept ones refer to, and every output that is being built.
    """
    reached = {node.directory for node in nodes}
    if keep.recorded:
        reached |= recorded(store.prefix)
    names = store.outputs()
    reached |= {n for n in names if any(_means(word, n) for word in keep.names)}
    reached = _with_origins(store, reached)
    report, now, references = Report(), time.time(), _references(store)
    for name in names:
        path = storage.join(store.prefix, name)
        if not _OURS & set(storage.list_names(path)):
            report.left.append(f"{path}: not an output of ours")
        elif (holder := lease.holder(path)) is not None:
            report.left.append(f"{path}: being built by {holder}")
        elif name not in reached:
            why = "no preset or recorded run needs it" if keep.recorded else "no preset needs it"
            report.garbage.append(_garbage(path, path, why, now))
        else:
            report.garbage += _left_overs(path, now, report, references.get(path, frozenset()))
    old = [g for g in report.garbage if g.age is None or g.age >= keep.younger_than]
    report.garbage = old
    return report


def _left_overs(path: str, now: float, report: Report, referenced: Set[str]) -> list[Garbage]:
    try:
        urls = unneeded(
            path, lambda _: True, keep_retired=False, thorough=True, referenced=referenced
        )
    except PonenteError as error:
        report.left.append(str(error))
        return []
    return [
        _garbage(url, path, "left by an attempt that lost or was replaced", now) for url in urls
    ]


def delete(store: Store, garbage: Iterable[Garbage], *, wait: float = 0.0) -> tuple[int, list[str]]:
    """Delete garbage, each output's under its lease.

    Args:
        store: where.
        garbage: of `find_garbage`.
        wait: seconds to watch leases whose owners may be dead.

    Returns:
        (bytes deleted, a line for each output that is left because it is being built).
    """
    by_root: dict[str, list[Garbage]] = {}
    for item in garbage:
        by_root.setdefault(item.root, []).append(item)
    held, references = lease.acquire_free(by_root, wait=wait), _references(store)
    freed, left = 0, [f"{root}: being built; left" for root in by_root if root not in held]
    for root, mine in held.items():
        referenced = references.get(root, frozenset())
        freed += _delete_whole(mine, by_root[root]) or _delete_parts(
            root, mine, by_root[root], referenced
        )
    forget_missing(store.prefix)
    return freed, left


def _delete_whole(held: lease.Lease, items: list[Garbage]) -> int:
    """Delete an output: its manifest first, so that no reader takes the rest for an output."""
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


def _delete_parts(root: str, held: lease.Lease, items: list[Garbage], referenced: Set[str]) -> int:
    def older(attempt: str) -> bool:
        return age_of(attempt)[0] < held.number

    freed = 0
    try:
        # A build may have ended since they were listed.
        still = set(unneeded(root, older, keep_retired=False, thorough=True, referenced=referenced))
        for item in items:
            if item.url in still and held.newest():
                storage.delete_tree(item.url)
                freed += item.size
    finally:
        held.release()
    return freed


def recorded(prefix: str) -> set[str]:
    """Directories of the outputs that runs in the store's event logs were about."""
    events = storage.join(prefix, "events")
    urls = [storage.join(events, name) for name, _ in storage.list_files(events)]
    starts = concurrently(_run_started, urls, local=storage.is_local(prefix))
    return {directory for directories in starts for directory in directories}


def _run_started(url: str) -> set[str]:
    found: set[str] = set()
    with storage.open_read(url) as file:
        for line in (file.readline() for _ in range(_FIRST_LINES)):
            if _RUN_STARTED not in line:
                continue
            try:
                found |= {str(node["directory"]) for node in json.loads(line)["graph"]}
            except (ValueError, KeyError, TypeError):
                continue  # torn
    return found


def _means(word: str, name: str) -> bool:
    return name.rpartition("-")[0] == word or name.startswith(word)


def _with_origins(store: Store, directories: set[str]) -> set[str]:
    kept, left = set(), list(directories)
    while left:
        name = left.pop()
        if name in kept or not is_output_name(name):
            continue
        kept.add(name)
        try:
            published = manifest.load(storage.join(store.prefix, name))
        except PonenteError:
            continue
        if published is not None and published.origin is not None:
            left.append(published.origin.directory)
    return kept


def _garbage(url: str, root: str, why: str, now: float) -> Garbage:
    size, newest = _measure(url)
    cost = None
    if url == root:
        try:
            published = manifest.load(root)
        except PonenteError:
            published = None
        cost = published.seconds if published is not None else None
    return Garbage(url, root, size, why, max(0.0, now - newest) if newest else None, cost)


def _measure(url: str) -> tuple[int, float]:
    """(bytes, Unix time of the newest write) of everything under `url`."""
    if not storage.is_local(url):
        return storage.usage(url)
    # Not `list_files`, which refuses a link: a tracker may leave any, and they go.
    path = storage.local_path(url)
    found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    states = [os.lstat(name) for name in found or [path] if os.path.lexists(name)]
    return sum(s.st_size for s in states), max((s.st_mtime for s in states), default=0.0)
