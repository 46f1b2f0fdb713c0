"""The build of an output that an attempt belongs to: never one begun with other default values.

A build's id is a digest of its recipe and of the output it replaces (`digests.build_id`). Recipes
leave out fields that have their default value, so after a change of a default the id alone would
let an attempt resume shards made with the old value. Every build therefore records the full
configurations of its attempts, and an attempt whose configuration conflicts with them belongs to
another build. A field added since is no conflict; a run that finds a build or output without it
records the field, so that a later change of its default is detected too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CorruptOutput
from pipeline.identity import digests, fingerprint
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY
from pipeline.store.manifest import Manifest

# Suffix of a recorded configuration; no shard's record ends with it.
_ENDING = "-.configuration"


@dataclass(frozen=True)
class Build:
    """A build of an output.

    Attributes:
        id: its name.
        conflicts: why an unfinished build is not resumed: one line per field that differs; empty
            when there is no such build.
    """

    id: str
    conflicts: tuple[str, ...] = ()


def find_build(
    root: str, recipe: str, replaces: str, config: Any, contents: Collection[str] = ()
) -> Build:
    """The build in the step directory `root` that an attempt with this configuration belongs to.

    Args:
        root: URL of the directory.
        recipe: digest of the recipe, see `digests.recipe`.
        replaces: attempt of the published output that is to be replaced; empty for none.
        config: full canonical configuration.
        contents: names of the arguments that the recipe has by content; their values may differ.
    """
    conflicts: tuple[str, ...] = ()
    for number in itertools.count():
        build = digests.build_id(recipe, replaces, number)
        found = tuple(_differences(root, build, config, contents))
        if not found:
            return Build(build, conflicts)
        conflicts = conflicts or found
    raise AssertionError("unreachable")


def claim_build(
    root: str, recipe: str, replaces: str, config: Any, contents: Collection[str] = ()
) -> Build:
    """`find_build`, and record the configuration in that build."""
    while True:
        build = find_build(root, recipe, replaces, config, contents)
        _record(root, build.id, config)
        # Checked again after recording: a driver with other defaults may have claimed it meanwhile.
        if not any(_differences(root, build.id, config, contents)):
            return build


def changed_defaults(
    path: str, published: Manifest, config: Any, contents: Collection[str] = ()
) -> list[str]:
    """Differences between the configurations of a published output and of a node, one line each.

    Both have the same key or recipe, so the differences are changed defaults. `contents` as for
    `find_build`.
    """
    if fingerprint.same(published.config, config):
        return []
    lines = _difference(published.config, config, contents)
    # The manifest lacks fields added since; `confirm` recorded their defaults next to the build.
    return lines or list(_differences(path, published.build, config, contents))


def confirm(path: str, published: Manifest, config: Any) -> None:
    """Record the configuration for which a run reused a published output."""
    if not fingerprint.same(published.config, config):
        _record(path, published.build, config)


def _difference(old: Any, new: Any, contents: Collection[str]) -> list[str]:
    was, now = (fingerprint.without_fields(config, contents) for config in (old, new))
    return fingerprint.difference(was, now)


def _record(root: str, build: str, config: Any) -> None:
    name = fingerprint.digest(config)[:16] + _ENDING
    storage.create(storage.join(root, DIRECTORY, build, name), json.dumps(config).encode())


def _differences(root: str, build: str, config: Any, contents: Collection[str]) -> Iterator[str]:
    directory = storage.join(root, DIRECTORY, build)
    for name in storage.list_names(directory):
        if not name.endswith(_ENDING):
            continue
        url = storage.join(directory, name)
        try:
            yield from _difference(storage.read_json(url), config, contents)
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptOutput(
                f"{url}: expected the configuration of a build, found {error!r}; delete the "
                "directory that it is in, and run again"
            ) from error
