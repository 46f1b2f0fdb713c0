"""Find the paths in an output's directory that no manifest needs, and delete them after a build.

They are deleted only under the output's lease, and only those of attempts with the lease's number
or a lower one: so the owner of lease n deletes no files of a later attempt, even if it was paused
in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from pipeline.errors import PonenteError
from pipeline.store import lease, manifest, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger, age_of
from pipeline.store.manifest import FAILURE, KEEP, RETIRED, Manifest
from pipeline.store.shards import ATTEMPTS, Shard

_KEPT_OF_AN_ATTEMPT = ("log.txt", "logs", FAILURE, KEEP)


class Tree:
    """Everything under a directory at one moment.

    Attributes:
        root: URL of the directory.
        entries: path relative to it -> (bytes, Unix time of the last write); a link and an empty
            directory are entries too.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.entries = storage.inventory(root)
        self._inside: dict[str, set[str]] = {}
        for path in self.entries:
            while path:
                above, _, name = path.rpartition("/")
                inside = self._inside.setdefault(above, set())
                if name in inside:
                    break
                inside.add(name)
                path = above

    def names(self, path: str = "") -> list[str]:
        """Sorted names directly under a path; empty when there is none."""
        return sorted(self._inside.get(path, ()))

    def under(self, path: str) -> list[str]:
        """Entries at or below a path; all of them for the empty one."""
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

    Args:
        root: the step's directory.
        held: the lease of the build; once another process has taken over, only data of `attempt` is
            deleted.
        attempt: the attempt that held the lease.
        lost: another attempt published, perhaps without shards that this one had recorded.
    """
    number = held.number if held.newest() else None

    def mine(name: str) -> bool:
        return name == attempt or (number is not None and age_of(name)[0] <= number)

    for path in unneeded(Tree(root), manifest.load(root), mine, thorough=lost):
        storage.delete_tree(storage.join(root, path))


def unneeded(
    tree: Tree,
    published: Manifest | None,
    mine: Callable[[str], bool],
    *,
    keep_retired: bool = True,
    thorough: bool = False,
    referenced: Set[str] = frozenset(),
) -> list[str]:
    """Paths in an output's directory that no manifest needs, in the order to delete them.

    Empty while nothing is published. Shards of an unfinished rebuild are kept, to resume from.

    Args:
        tree: the files in the directory.
        published: its manifest.
        mine: whether data of the attempt of this name may be deleted.
        keep_retired: keep the shards of manifests that a rebuild replaced; a reader may use them.
        thorough: read every ledger record, even when there is only one ledger.
        referenced: paths that other outputs refer to (`Manifest.named_paths`); replaced manifests
            with such paths are kept.
    """
    if published is None:
        return []
    retired = _retired(tree)
    if not keep_retired:
        retired = {
            path: m
            for path, m in retired.items()
            if m and not referenced.isdisjoint(m.named_paths())
        }
    kept = {needed for m in (published, *retired.values()) if m for needed in m.paths()}
    gone = [] if keep_retired else sorted(set(_retired_paths(tree)) - set(retired))
    generations = tree.names(LEDGER)
    for generation in generations if thorough or len(generations) > 1 else ():
        ledger = Ledger(tree.root, generation)
        records = [n for n in tree.names(f"{LEDGER}/{generation}") if n.endswith(".json")]
        names = {ledger.shard_name(record) for record in records}
        if len(generations) == 1 and names <= {shard.name for shard in published.shards}:
            continue  # the ledger of the published output, with no other shards in it
        shards = ledger.finished()
        if _resumable(shards.values(), kept, published.attempt):
            kept |= {shard.root for shard in shards.values()}
            continue
        gone += [
            ledger.record(name).removeprefix(f"{tree.root}/")
            for name, shard in shards.items()
            if shard.root not in kept and mine(shard.attempt)
        ]
    for attempt in filter(mine, tree.names(ATTEMPTS)):
        gone += _of_attempt(tree, attempt, kept)
    return gone


def _resumable(shards: Iterable[Shard], kept: set[str], published: str) -> bool:
    """Whether these are shards of a rebuild that began after the published attempt."""
    shards = list(shards)
    return not any(shard.root in kept for shard in shards) and any(
        age_of(shard.attempt) > age_of(published) for shard in shards
    )


def _of_attempt(tree: Tree, attempt: str, kept: set[str]) -> Iterator[str]:
    """Paths of an attempt's data outside the `kept` directories."""
    inside = f"{ATTEMPTS}/{attempt}/"
    used = [path for path in kept if f"{path}/".startswith(inside)]
    for name in tree.names(f"{ATTEMPTS}/{attempt}"):
        if name in _KEPT_OF_AN_ATTEMPT:
            continue
        part = f"{inside}{name}"
        below = [path for path in used if path.startswith(f"{part}/")]
        if any(f"{part}/".startswith(f"{path}/") for path in used):
            continue
        if not below:
            yield part
        else:
            # Files of unfinished shards, or of shards that another writer recorded first.
            yield from (
                path
                for path in tree.under(part)
                if not any(f"{path}/".startswith(f"{shard}/") for shard in below)
            )


def _retired_paths(tree: Tree) -> list[str]:
    return [f"{RETIRED}/{name}" for name in tree.names(RETIRED)]


def _retired(tree: Tree) -> Mapping[str, Manifest | None]:
    """Manifests of this step that a rebuild replaced, by path; None for one that is corrupt."""
    found: dict[str, Manifest | None] = {}
    for path in _retired_paths(tree):
        try:
            found[path] = manifest.parse(storage.join(tree.root, path), tree.root)
        except PonenteError:
            found[path] = None
    return found
