"""The four digests of the engine, and the one question that each answers.

    key       which output is this?             names its directory; known before anything runs
    recipe    what is it made from?             the key, with what the inputs hold for their keys
    build_id  which making of it is this?       names the ledger that attempts share
    content   what does the output say?         equal content stops changes there (early cutoff)

All are SHA-256 over canonical JSON (see `pipeline.identity.fingerprint`). Fields of a configuration
that have their default value are in none of them, so adding one changes none. Whether a default was
changed is asked where an output or an unfinished build is found: each has the full configuration
that it was made with, and `fingerprint.difference` names the fields that disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.identity.fingerprint import digest, without_defaults

# Parts of a result that may differ between two runs that made the same thing: times, and words.
NON_IDENTITY_FIELDS = ("measured", "headline", "progress")


@dataclass(frozen=True)
class Identity:
    """What a node computes, whatever its inputs are.

    Attributes:
        step: stable name of the step.
        version: that the step declares.
        config: canonical configuration, fields with their default value included.
    """

    step: str
    version: int
    config: Any

    def to_json(self) -> dict[str, Any]:
        """What of it is in digests."""
        config = without_defaults(self.config)
        return {"step": self.step, "version": self.version, "config": config}


def key(identity: Identity, inputs: Mapping[str, str]) -> str:
    """Which output is this? From the step, its version, its configuration and its inputs' keys."""
    return digest({**identity.to_json(), "inputs": dict(inputs)})


def recipe(identity: Identity, contents: Mapping[str, str]) -> str:
    """What is it made from? As `key`, with the inputs' contents for their keys.

    Two nodes with one recipe make the same thing, whatever their inputs were made from.

    Args:
        identity: of the node.
        contents: content by input name; of an input that is still being made, its build's id. The
            digest of what an external argument stands for is one too, in place of its value.
    """
    config = without_defaults(identity.config)
    fields = {n: value for n, value in config["fields"].items() if n not in contents}
    made_from = {**identity.to_json(), "config": {"fields": fields}, "contents": dict(contents)}
    return digest(made_from)


def build_id(recipe: str, replaces: str, number: int = 0) -> str:
    """Which making of it is this? Attempts at one build resume each other's work.

    Args:
        recipe: what is made.
        replaces: attempt of the published output that the build is to replace; empty for none.
        number: counts builds that a default which was changed sets apart, see `store.builds`.
    """
    return digest([recipe, replaces, *([number] if number else [])])[:12]


class _File(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...


class _Shard(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def files(self) -> tuple[_File, ...]: ...
    @property
    def result(self) -> dict[str, Any]: ...


def content(shards: Iterable[_Shard], result: Mapping[str, Any], opened: Mapping[str, str]) -> str:
    """What does the output say? Equal when nothing that reads it could find a difference.

    Args:
        shards: a shard whose result has "content" is known by that digest, for formats that write
            the same data under other bytes; one whose "content" is None is kept beside the output
            and is no part of what it says; any other is known by its files.
        result: without what is only measured (`NON_IDENTITY_FIELDS`).
        opened: contents of those inputs that the artifact itself opens (see `Artifact.opens`), or
            of the output that a reference stands for, which includes what that opens.
    """
    parts = [
        [
            shard.name,
            _identifying(shard.result),
            shard.result.get("content") or [[f.path, f.size, f.sha256] for f in shard.files],
        ]
        for shard in sorted(shards, key=lambda shard: shard.name)
        if shard.result.get("content", "") is not None
    ]
    return digest({"shards": parts, "result": _identifying(result), "opened": dict(opened)})


def _identifying(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in NON_IDENTITY_FIELDS}
