"""Protection: what in a store may not be deleted now, computed in one function.

Protected are the outputs that presets, recorded runs and names ask for, those that every live lease
reads, those whose files the manifest of a protected one refers to, and the inputs that a protected
one needs to be used, such as the tokenizer of a model. Everything else is garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import PonenteError
from pipeline.store import manifest, storage
from pipeline.store.ledger import age_of
from pipeline.store.left_overs import replaced
from pipeline.store.manifest import Manifest, resolve_ref
from pipeline.store.outputs import Store, is_output_name
from pipeline.store.parallel import concurrently, in_order
from pipeline.store.run_summary import recorded

_HELD = 1_000  # manifests in memory


@dataclass(frozen=True)
class Keep:
    """What `gc` keeps in addition to the outputs of the given graphs.

    Attributes:
        recorded: outputs of every run in the store's event logs.
        younger_than: data written in the last so many seconds.
        outputs: names of directories.
    """

    recorded: bool = True
    younger_than: float = 0.0
    outputs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PublishedManifest:
    """What protection needs of the manifest in one output's directory.

    Attributes:
        error: why its manifest cannot be read; None when it can, or there is none.
        needs: directories of the inputs that it needs to be used; for an alias that lacks some, the
            output that it refers to is one of them.
        files: directory with its files when it is an alias, else empty; `paths` is what of it the
            manifest lists, see `Manifest.named_paths`.
        manifest: the manifest itself, of the first `_HELD` outputs of a store.
    """

    there: bool = False
    error: PonenteError | None = None
    seconds: float | None = None
    needs: tuple[str, ...] = ()
    files: str = ""
    paths: frozenset[str] = frozenset()
    manifest: Manifest | None = None

    @classmethod
    def of(cls, path: str, found: Manifest) -> PublishedManifest:
        home = found.home(path)
        alias = home != path
        names = found.inputs if found.needs is None else found.needs
        needs = [
            resolve_ref(path, found.inputs[n]["directory"]) for n in names if n in found.inputs
        ]
        if alias and (not found.inputs or len(needs) < len(names)):
            needs.append(home)
        paths = found.named_paths() if alias else frozenset()
        return cls(True, None, found.seconds, tuple(needs), home if alias else "", paths, found)


@dataclass(frozen=True)
class Protection:
    """What may not be deleted from a store; outputs are given by the names of their directories.

    Attributes:
        paths: by output: what of it the manifests of other outputs list.
        since: by output: the oldest attempt that a live lease may read.
    """

    outputs: frozenset[str]
    paths: Mapping[str, frozenset[str]]
    since: Mapping[str, str]
    published: Mapping[str, PublishedManifest] = field(repr=False)

    def covers(self, name: str, old: Manifest) -> bool:
        """Whether the shards of a manifest that a rebuild replaced stay."""
        if name in self.since and age_of(old.attempt) >= age_of(self.since[name]):
            return True
        return not self.paths.get(name, frozenset()).isdisjoint(old.named_paths())


def protection(
    store: Store, wanted: Iterable[str], keep: Keep, owners: Iterable[Mapping[str, Any]]
) -> Protection:
    """What may not be deleted from the store now.

    `wanted` are directories that presets ask for, `owners` the records of the owners of live
    leases.
    """
    names = store.outputs()
    urls = [storage.join(store.prefix, name) for name in names]
    published: dict[str, PublishedManifest] = {}
    for name, found in zip(names, in_order(_published, urls, store.prefix), strict=True):
        published[name] = found if len(published) < _HELD else replace(found, manifest=None)
    asked = {*wanted, *keep.outputs, *recorded(store.prefix, live=not keep.recorded)}
    since = {}
    read = [owner.get("reads") for owner in owners]
    for directory, attempt in [each for r in read if isinstance(r, dict) for each in r.items()]:
        if name := _name(store, directory):
            asked.add(name)
            if isinstance(attempt, str):
                since[name] = min(since.get(name, attempt), attempt, key=age_of)
    old = _opened(store, since, published)
    paths: dict[str, frozenset[str]] = {}
    for each in [*published.values(), *old]:
        if name := _name(store, each.files):
            paths[name] = paths.get(name, frozenset()) | each.paths
    return Protection(_reached(store, {*asked, *since}, published), paths, since, published)


def _opened(
    store: Store, since: dict[str, str], published: Mapping[str, PublishedManifest]
) -> list[PublishedManifest]:
    """The replaced manifests that live leases may read; adds to `since` what they read through."""
    old: list[PublishedManifest] = []
    new = list(since)
    while new:
        readers = [(storage.join(store.prefix, name), since[name]) for name in new]
        replaced = concurrently(_replaced, readers, store.prefix)
        reached: set[str] = set()
        for name, found in zip(new, replaced, strict=True):
            old += found
            for each in [published.get(name, PublishedManifest()), *found]:
                reached |= {_name(store, url) for url in (*each.needs, each.files)}
        new = [name for name in reached if name and name not in since]
        since |= dict.fromkeys(new, "")  # which attempt of it was opened is not known
    return old


def _reached(
    store: Store, asked: Iterable[str], published: Mapping[str, PublishedManifest]
) -> frozenset[str]:
    used: set[str] = set()
    files: set[str] = set()
    left = [name for name in asked if is_output_name(name)]
    while left:
        name = left.pop()
        if name in used:
            continue
        used.add(name)
        found = published.get(name, PublishedManifest())
        left += [other for url in found.needs if (other := _name(store, url))]
        files |= {_name(store, found.files)} - {""}
    return frozenset(used | files)


def _name(store: Store, directory: str) -> str:
    prefix, _, name = directory.rpartition("/")
    return name if prefix in ("", store.prefix) else ""


def _published(path: str) -> PublishedManifest:
    try:
        found = manifest.load(path)
        return PublishedManifest.of(path, found) if found is not None else PublishedManifest()
    except PonenteError as error:
        return PublishedManifest(error=error)


def _replaced(reader: tuple[str, str]) -> list[PublishedManifest]:
    path, attempt = reader
    found = [m for m in replaced(path).values() if m and age_of(m.attempt) >= age_of(attempt)]
    return [PublishedManifest.of(path, m) for m in found]
