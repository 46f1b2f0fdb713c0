"""Finding outputs: in the user's own store, and then in shared stores, which are only read.

`find` looks up an output by the node's key, `same` by its action digest: when an input was built
again and has the same content as before, the output made from it is still valid (early cutoff).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import CorruptOutput, PonenteError
from pipeline.identity import digests
from pipeline.identity.digests import Identity
from pipeline.store import manifest, storage
from pipeline.store.builds import changed_defaults
from pipeline.store.manifest import Manifest
from pipeline.store.parallel import by_item, concurrently

_INDEX = "index"
_OUTPUT_NAME = re.compile(r".+-[0-9a-f]{20}")

logger = logging.getLogger("ponente")


class Wanted(Protocol):
    """The attributes of a `Node` by which its output is found."""

    key: str
    directory: str
    identity: Identity
    reads_lineage: bool


@dataclass(frozen=True)
class Found:
    """A published output: the URL of its directory, its manifest, and whether it is shared."""

    path: str
    manifest: Manifest
    shared: bool = False

    def headline(self, labels: Mapping[str, str]) -> list[str]:
        """Lines about the output to display; `labels` are a graph's, by the steps' keys."""
        home, lines = self.manifest.home(self.path), self.manifest.result.get("headline", ())
        lines = [lines] if isinstance(lines, str) else lines
        return [manifest.fill(str(line), home, labels) for line in lines]

    @property
    def elsewhere(self) -> str | None:
        """URL of the directory with its files; None when that is its own in the user's store."""
        home = self.manifest.home(self.path)
        return home if self.shared or home != self.path else None


class Store:
    """The outputs under `prefix`, and under `shared` prefixes that are never written to.

    With `link`, outputs may refer to those of other stores; else what they need is copied.
    """

    def __init__(self, prefix: str, shared: tuple[str, ...] = (), *, link: bool = False) -> None:
        self.prefix = storage.normalise(prefix)
        self.link = link
        self.shared = tuple(storage.normalise(url) for url in shared)
        self._unreachable: dict[str, str] = {}

    def path(self, node: Wanted) -> str:
        return storage.join(self.prefix, node.directory)

    def find(self, node: Wanted) -> Found | None:
        """The node's output, from the first store that has it.

        `CorruptOutput` when it is in the user's own store but differs from what was recorded.
        """
        path = self.path(node)
        own = manifest.load_keyed(path, node.key)
        if own is not None:
            self._check_files(path, own)
            return Found(path, own)
        for prefix in self.shared:
            path = storage.join(prefix, node.directory)
            try:
                found = manifest.load_verified(path, node.key)
            except (PonenteError, OSError) as error:
                # Another user's store: a corrupt output in it must not stop this build.
                logger.warning("shared store %s is skipped: %s", prefix, error)
                continue
            if found is not None:
                return Found(path, found, shared=True)
        return None

    def _check_files(self, path: str, own: Manifest) -> None:
        other = own.home(path).rpartition("/")[0]
        if other in self._unreachable:
            raise CorruptOutput(f"{path}: {self._unreachable[other]}")
        try:
            manifest.check_files(path, own)
        except CorruptOutput as error:
            if error.__cause__ is not None:
                self._unreachable[other] = f"refers to {other}, which cannot be read"
            raise

    def same(self, node: Wanted, contents: Mapping[str, str]) -> Found | None:
        if node.reads_lineage or not contents:
            return None
        action = digests.action(node.identity, contents)
        for prefix in (self.prefix, *self.shared):
            try:
                entry = storage.read_json(_entry(prefix, action))
                path = storage.join(prefix, entry["directory"])
                found = manifest.load_verified(path, entry["key"])
            except FileNotFoundError:
                continue
            except (PonenteError, OSError, ValueError, TypeError, KeyError) as error:
                if prefix == self.prefix and isinstance(error, OSError):
                    raise
                logger.warning("index of %s is skipped: %s", prefix, error)
                continue
            if found is None or found.action != action:
                continue
            if not changed_defaults(path, found, node.identity.config, contents):
                return Found(path, found, shared=prefix != self.prefix)
        return None

    def outputs(self) -> list[str]:
        """Names of the directories in the user's own store that have the form of an output's."""
        return [name for name in storage.list_names(self.prefix) if is_output_name(name)]


def is_output_name(name: str) -> bool:
    """Whether a name has the form of an output's directory: step, dash, first digits of the key."""
    return _OUTPUT_NAME.fullmatch(name) is not None


def remember(path: str, action: str, key: str) -> None:
    prefix, _, directory = path.rpartition("/")
    entry = json.dumps({"directory": directory, "key": key}).encode()
    storage.write_atomic(_entry(prefix, action), entry, durable=False)


def _entry(prefix: str, action: str) -> str:
    return storage.join(prefix, _INDEX, action[:2], f"{action}.json")


def forget_missing(prefix: str) -> int:
    """Delete index entries whose output does not exist; returns their number."""
    index = storage.join(prefix, _INDEX)
    parts = [storage.join(index, part) for part in storage.list_names(index)]
    names = by_item(storage.list_names, parts, prefix)
    urls = [storage.join(part, name) for part, found in names.items() for name in found]

    def forget(url: str) -> bool:
        try:
            directory = storage.read_json(url)["directory"]
            there = storage.exists(storage.join(prefix, directory, manifest.NAME))
        except (PonenteError, ValueError, TypeError, KeyError):
            there = False
        if not there:
            storage.delete_tree(url)
        return not there

    return sum(concurrently(forget, urls, prefix))
