"""What lies in a step's directory that no published output needs, and deleting it."""

from __future__ import annotations

from pipeline.errors import PonenteError
from pipeline.store import manifest, storage
from pipeline.store.ledger import DIRECTORY as LEDGER
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest

ATTEMPTS = "attempts"
RETIRED = "retired"
FAILURE = "failure.json"
_LOOKED_AT = ("metrics.jsonl", "traces", "tensorboard", "wandb", "stacks")
"""What training leaves beside its checkpoints for people, who want it of every attempt.

Kept by name, because a step may put bulky data anywhere in its attempt's directory.
"""
_KEPT_OF_AN_ATTEMPT = ("log.txt", "logs", FAILURE, *_LOOKED_AT)


def retired(root: str) -> list[Manifest]:
    """Manifests of this step that a rebuild replaced, whose files are still here."""
    found = []
    for name in storage.list_names(storage.join(root, RETIRED)):
        try:
            found.append(manifest.parse(storage.join(root, RETIRED, name)))
        except PonenteError:
            continue
    return [m for m in found if m is not None]


def discard_unreferenced(root: str, *, lost: bool = False) -> None:
    """Delete the data of attempts that no manifest here refers to; logs and metrics stay.

    `lost`: the caller did not publish, and may have recorded shards that the winner had dropped.
    """
    for url in unreferenced(root, lost=lost):
        storage.delete_tree(url)


def unreferenced(root: str, *, keep_retired: bool = True, lost: bool = False) -> list[str]:
    """URLs in the step's directory that no manifest needs, in the order to delete them.

    Nothing while nothing is published: an unfinished build's shards are all worth keeping.

    Args:
        root: the step's directory.
        keep_retired: count manifests that a rebuild replaced; a reader may have them open.
        lost: look at every ledger record, even when there is one ledger only.
    """
    published = manifest.load(root)
    if published is None:
        return []
    manifests = [published, *(retired(root) if keep_retired else ())]
    kept = {s.root for m in manifests if m.origin is None for s in m.shards}
    gone = [] if keep_retired else _all(storage.join(root, RETIRED))
    gone += _stray_records(root, kept, thorough=lost or not keep_retired)
    attempts = storage.join(root, ATTEMPTS)
    for attempt in storage.list_names(attempts):
        inside = f"{ATTEMPTS}/{attempt}/"
        if any(path.startswith(inside) for path in kept):
            gone += _unrecorded(root, attempt, kept)
        else:
            names = storage.list_names(storage.join(attempts, attempt))
            gone += [
                storage.join(attempts, attempt, name)
                for name in names
                if name not in _KEPT_OF_AN_ATTEMPT
            ]
    return gone


def _all(directory: str) -> list[str]:
    return [storage.join(directory, name) for name in storage.list_names(directory)]


def _stray_records(root: str, kept: set[str], *, thorough: bool) -> list[str]:
    """Ledger records of shards whose files are about to go: of another generation, or a loser's."""
    generations = storage.list_names(storage.join(root, LEDGER))
    stray = []
    for generation in generations if thorough or len(generations) > 1 else ():
        for name, shard in Ledger(root, generation).finished().items():
            if shard.root not in kept:
                stray.append(Ledger(root, generation).record(name))
    return stray


def _unrecorded(root: str, attempt: str, kept: set[str]) -> list[str]:
    """Files inside a kept attempt of shards nobody refers to: cut off, or of a lost race."""
    directory = storage.join(root, ATTEMPTS, attempt)
    parts = [name for name in storage.list_names(directory) if name.startswith("shards")]
    given_up = []
    for part in parts:
        inside = f"{ATTEMPTS}/{attempt}/{part}/"
        used = {path.removeprefix(inside) for path in kept if path.startswith(inside)}
        found = {path for path, _ in storage.list_files(storage.join(directory, part))}
        given_up += [
            storage.join(directory, part, path)
            for path in found
            if not any(path.startswith(f"{shard}/") for shard in used)
        ]
    return given_up
