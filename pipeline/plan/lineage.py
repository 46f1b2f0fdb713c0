"""The lineage of an output, and the outputs that use it, read from manifests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.errors import CorruptOutput
from pipeline.store import storage
from pipeline.store.manifest import Manifest, readable, resolve_ref
from pipeline.store.parallel import by_item


class Ancestor(NamedTuple):
    """One published output of a lineage."""

    path: str
    manifest: Manifest

    @property
    def directory(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parents(self) -> list[str]:
        """URLs of the outputs it read, and of the one it refers to."""
        inputs = [reference["directory"] for reference in self.manifest.inputs.values()]
        if self.manifest.alias is not None:
            inputs.append(self.manifest.alias.directory)
        return list(dict.fromkeys(resolve_ref(self.path, directory) for directory in inputs))


def lineage(paths: list[str]) -> list[Ancestor]:
    """The outputs at `paths` and all of their ancestors, inputs first, each once.

    One that is missing or cannot be read is left out. `CorruptOutput` for an ancestor of itself.
    """
    found: dict[str, Ancestor] = {}
    read = _read_together(paths)
    # Outputs whose ancestors are being visited. Not recursive: a lineage can exceed Python's stack.
    entered: dict[str, Ancestor] = {}
    stack = [(path, False) for path in reversed(paths)]
    while stack:
        path, visited = stack.pop()
        if visited:
            found[path] = entered.pop(path)
        elif path in entered:
            raise CorruptOutput(
                f"{path}: the manifests say it was made from itself; move it away and run again"
            )
        elif path not in found and (manifest := read[path]) is not None:
            entered[path] = ancestor = Ancestor(path, manifest)
            stack.append((path, True))
            stack.extend((parent, False) for parent in reversed(ancestor.parents))
            read |= _read_together(parent for parent in ancestor.parents if parent not in read)
    return list(found.values())


def _read_together(paths: Iterable[str]) -> dict[str, Manifest | None]:
    paths = list(paths)
    return by_item(readable, paths, next((p for p in paths if not storage.is_local(p)), ""))


def users(prefix: str, directories: list[str], path: str) -> list[str]:
    read = _read_together(storage.join(prefix, name) for name in directories)
    return [
        name
        for name, (place, manifest) in zip(directories, read.items(), strict=True)
        if manifest and path in Ancestor(place, manifest).parents
    ]
