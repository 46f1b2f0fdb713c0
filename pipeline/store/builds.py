"""Which build of an output an attempt belongs to: never one that was begun with other defaults.

A build is named by what it makes and what it replaces (`digests.build_id`). Neither has the fields
that are at their default, so a default that is changed would have an attempt resume shards of the
old one. Every build therefore keeps the full configurations that its attempts had, and one that
disagrees with them is another build. A field that was added since does not disagree.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CorruptOutput
from pipeline.identity import digests, fingerprint
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY

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


def find_build(root: str, recipe: str, replaces: str, config: Any) -> Build:
    """The build in the step directory `root` that an attempt with this configuration belongs to."""
    conflicts: tuple[str, ...] = ()
    for number in itertools.count():
        build = digests.build_id(recipe, replaces, number)
        found = tuple(_differences(root, build, config))
        if not found:
            return Build(build, conflicts)
        conflicts = conflicts or found
    raise AssertionError("unreachable")


def claim_build(root: str, recipe: str, replaces: str, config: Any) -> Build:
    """`find_build`, and record there that an attempt with this configuration takes part in it."""
    name = fingerprint.digest(config)[:16] + _ENDING
    while True:
        build = find_build(root, recipe, replaces, config)
        url = storage.join(root, DIRECTORY, build.id, name)
        storage.create(url, json.dumps(config).encode())
        # Another driver, with other defaults, may have claimed it at the same moment.
        if not any(_differences(root, build.id, config)):
            return build


def _differences(root: str, build: str, config: Any) -> Iterator[str]:
    directory = storage.join(root, DIRECTORY, build)
    for name in storage.list_names(directory):
        if name.endswith(_ENDING):
            url = storage.join(directory, name)
            try:
                yield from fingerprint.difference(storage.read_json(url), config)
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CorruptOutput(
                    f"{url}: expected the configuration of an unfinished build, found {error!r}; "
                    "delete the file's directory to begin the build again"
                ) from error
