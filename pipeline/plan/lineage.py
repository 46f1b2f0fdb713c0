"""Everything an output was made from, read from manifests; and a picture of it."""

from __future__ import annotations

import html
from dataclasses import dataclass

from pipeline.errors import CorruptOutput
from pipeline.pages.layout import ARROW_TIP, Box, layered
from pipeline.store import storage
from pipeline.store.manifest import Manifest, beside, load

_BOX = Box()


@dataclass(frozen=True)
class Ancestor:
    """One published output of a lineage: its directory's URL and its manifest."""

    path: str
    manifest: Manifest

    @property
    def directory(self) -> str:
        """Name of its directory."""
        return self.path.rpartition("/")[2]

    @property
    def parents(self) -> list[str]:
        """URLs of the outputs it read, and of the one it refers to."""
        said = [reference["directory"] for reference in self.manifest.inputs.values()]
        origin = self.manifest.origin
        if origin is not None:
            said.append(origin.directory)
        return list(dict.fromkeys(beside(self.path, directory) for directory in said))


def lineage(paths: list[str]) -> list[Ancestor]:
    """The outputs at `paths` and everything they were made from, inputs first, each once.

    What is missing or cannot be read is left out, with what it was made from.

    Raises:
        CorruptOutput: when an output is said to be made from itself.
    """
    found: dict[str, Ancestor] = {}
    # Ancestors whose parents are being visited; a lineage can be longer than Python's stack.
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
        elif path not in found and (manifest := _readable(path)) is not None:
            entered[path] = ancestor = Ancestor(path, manifest)
            stack.append((path, True))
            stack.extend((parent, False) for parent in reversed(ancestor.parents))
    return list(found.values())


def _readable(path: str) -> Manifest | None:
    try:
        return load(path)
    except CorruptOutput:
        return None


def users(prefix: str, directories: list[str], path: str) -> list[str]:
    """Names of those outputs in the store at `prefix` that read the output in directory `path`."""
    found = []
    for name in directories:
        manifest = _readable(storage.join(prefix, name))
        if manifest and path in Ancestor(storage.join(prefix, name), manifest).parents:
            found.append(name)
    return found


def draw(ancestors: list[Ancestor]) -> str:
    """The lineage as an SVG: a box per step with its time and size, an arrow per input.

    Boxes stand in columns by the longest way from a source; an input that is gone has no box.
    """
    layout = layered({a.path: a.parents for a in ancestors}, _BOX)
    arrows = [
        f'<path class="edge" d="{path}" marker-end="url(#tip)"/>' for path in layout.edges.values()
    ]
    boxes = [_box(ancestor, *layout.places[ancestor.path]) for ancestor in ancestors]
    return (
        f'<svg class="dag" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" '
        f'style="max-width:{layout.width:.0f}px" role="img" aria-label="graph of steps">'
        + ARROW_TIP
        + "".join(arrows + boxes)
        + "</svg>"
    )


def _box(ancestor: Ancestor, x: float, y: float) -> str:
    manifest = ancestor.manifest
    size = sum(shard.bytes for shard in manifest.shards)
    details = f"{manifest.seconds:.1f} s" + (f", {size / 1e6:,.1f} MB" if size else "")
    return (
        f'<g transform="translate({x:.1f} {y:.1f})">'
        f"<title>{html.escape(ancestor.directory)}</title>"
        f'<rect width="{_BOX.width}" height="{_BOX.height}" rx="8"/>'
        f'<text x="12" y="23" class="name">{html.escape(manifest.label)}</text>'
        f'<text x="12" y="42" class="small">{html.escape(details)}</text></g>'
    )
