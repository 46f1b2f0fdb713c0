"""Which build of an output an attempt belongs to: never one that was begun with other defaults.

A build is named by what it makes and what it replaces (`digests.build_id`). Neither has the fields
that are at their default, so a default that is changed would have an attempt resume shards of the
old one. Every build therefore keeps the full configurations that its attempts had, and one that
disagrees with them is another build. A field that was added since does not disagree, and is
recorded when a run first meets the build or its output without it, so that a later change of that
default is noticed too.
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

# No shard's record ends like this.
_ENDING = "-.configuration"


@dataclass(frozen=True)
class Build:
    """A build of an output.

    Attributes:
        id: its name.
        conflicts: why an unfinished build is not resumed: fields that it has otherwise, a line
            each; empty when none had to be left aside.
    """

    id: str
    conflicts: tuple[str, ...] = ()


def find_build(
    root: str, recipe: str, replaces: str, config: Any, contents: Collection[str] = ()
) -> Build:
    """The build in the step directory `root` that an attempt with this configuration belongs to.

    Args:
        root: URL of the directory.
        recipe: what is made.
        replaces: attempt of the published output that is to be replaced; empty for none.
        config: full canonical configuration.
        contents: names of what the recipe has by content, which configurations may have otherwise.
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
    """`find_build`, and record there that an attempt with this configuration takes part in it."""
    while True:
        build = find_build(root, recipe, replaces, config, contents)
        _record(root, build.id, config)
        # Another driver, with other defaults, may have claimed it at the same moment.
        if not any(_differences(root, build.id, config, contents)):
            return build


def changed_defaults(
    path: str, published: Manifest, config: Any, contents: Collection[str] = ()
) -> list[str]:
    """What the output in directory `path` was made with otherwise, a line each.

    Its key or its recipe is the configuration's; `contents` as for `find_build`.
    """
    if published.config == config:
        return []
    lines = _difference(published.config, config, contents)
    # A field that it lacks had a default when a run first took it for the same.
    return lines or list(_differences(path, published.build, config, contents))


def confirm(path: str, published: Manifest, config: Any) -> None:
    """Record that a run took a published output for what the configuration asks for."""
    if published.config != config:
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
