"""Find the paths in an output's directory that no manifest needs, and delete them after a build.

They are deleted only under the output's lease, and only those of attempts with the lease's number
or a lower one: so the owner of lease n deletes no files of a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import PurePosixPath

from pipeline.errors import PonenteError
from pipeline.store import lease, local_storage, manifest, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger, age_of, shard_of
from pipeline.store.manifest import FAILURE, KEEP, RETIRED, Manifest
from pipeline.store.shards import ATTEMPTS

_KEPT_OF_AN_ATTEMPT = ("log.txt", "logs", FAILURE, KEEP)


class Tree:
    """Everything under a directory at one moment, links and empty directories too.

    `entries` are by path relative to `root`: (bytes, Unix time of the last write).
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.entries = storage.inventory(root)
        self._inside: dict[str, set[str]] = {}
        self.index()

    def index(self) -> None:
        for path in self.entries:
            while path:
                above, _, name = path.rpartition("/")
                inside = self._inside.setdefault(above, set())
                if name in inside:
                    break
                inside.add(name)
                path = above

    def names(self, path: str = "") -> list[str]:
        return sorted(self._inside.get(path, ()))

    def under(self, path: str) -> list[str]:
        if path in self.entries:
            return [path]
        return [
            entry
            for name in self.names(path)
            for entry in self.under(f"{path}/{name}" if path else name)
        ]

    def measure(self, path: str = "") -> tuple[int, float]:
        """(bytes, Unix time of the newest write, 0 if not known) of the entries under a path."""
        found = [self.entries[entry] for entry in self.under(path)]
        return sum(size for size, _ in found), max((time or 0.0 for _, time in found), default=0.0)


def tidy(root: str, held: lease.Lease, attempt: str, *, lost: bool) -> None:
    """Delete the files that no manifest needs after a build; logs and files in `keep/` stay.

    Once another process has taken over the lease, only data of `attempt` is deleted. `lost` means
    that another attempt published, perhaps without shards that this one had recorded.
    """
    number = held.number if held.newest() else None

    def mine(name: str) -> bool:
        return name == attempt or (number is not None and age_of(name)[0] <= number)

    # Every replaced manifest stays, as a reader may have it open; gc knows of the readers.
    for path in unneeded(Tree(root), manifest.load(root), mine, lambda _: True, thorough=lost):
        storage.delete_tree(f"{root}/{path}")


def unneeded(
    tree: Tree,
    published: Manifest | None,
    mine: Callable[[str], bool],
    stays: Callable[[Manifest], bool],
    *,
    thorough: bool = False,
) -> list[str]:
    """Paths in an output's directory that no manifest needs, in the order to delete them.

    Empty while nothing is published. Shards of an unfinished rebuild are kept, to resume from.
    `mine` says whether data of an attempt may be deleted, `stays` whether the shards of a manifest
    that a rebuild replaced are protected; `thorough` reads every ledger record.
    """
    if published is None:
        return []
    old = replaced(tree.root, tree.names(RETIRED))
    retired = {path: m for path, m in old.items() if m and stays(m)}
    kept = {path for m in (published, *retired.values()) for path in m.paths()}
    gone = sorted(old.keys() - retired.keys())
    builds = tree.names(LEDGER)
    for build in builds if thorough or len(builds) > 1 else ():
        ledger = Ledger(tree.root, build)
        records = [n for n in tree.names(f"{LEDGER}/{build}") if n.endswith(".json")]
        names = {shard_of(record) for record in records}
        if len(builds) == 1 and names <= {shard.name for shard in published.shards}:
            continue  # the ledger of the published output, with no other shards in it
        shards, since = ledger.finished(), age_of(published.attempt)
        roots = {shard.root for shard in shards.values()}
        if not roots & kept and any(age_of(s.attempt) > since for s in shards.values()):
            kept |= roots  # of an unfinished rebuild
            continue
        gone += [
            ledger.record(name).removeprefix(f"{tree.root}/")
            for name, shard in shards.items()
            if shard.root not in kept and mine(shard.attempt)
        ]
    above = {str(path) for root in kept for path in PurePosixPath(root).parents}
    for attempt in filter(mine, tree.names(ATTEMPTS)):
        for name in tree.names(f"{ATTEMPTS}/{attempt}"):
            if name not in _KEPT_OF_AN_ATTEMPT:
                gone += _outside(tree, f"{ATTEMPTS}/{attempt}/{name}", kept, above)
    gone += [path for path in tree.entries if local_storage.TEMPORARY.fullmatch(path)]
    return [*dict.fromkeys(gone)]


def _outside(tree: Tree, path: str, kept: Set[str], above: Set[str]) -> Iterator[str]:
    """The largest paths at or below one that are outside `kept`, whose parents are `above`."""
    if path in above and path not in kept:
        # Files of unfinished shards, or of shards that another writer recorded first.
        for name in tree.names(path):
            yield from _outside(tree, f"{path}/{name}", kept, above)
    elif path not in kept:
        yield path


def replaced(root: str, names: Iterable[str] | None = None) -> dict[str, Manifest | None]:
    """Manifests in an output's directory that rebuilds replaced, by path; None if corrupt."""
    if names is None:
        names = storage.list_names(storage.join(root, RETIRED))
    found: dict[str, Manifest | None] = {}
    for path in (f"{RETIRED}/{name}" for name in names):
        try:
            found[path] = manifest.parse(storage.join(root, path), root)
        except PonenteError:
            found[path] = None
    return found
