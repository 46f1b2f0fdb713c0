"""The four digests of the engine: SHA-256 over canonical JSON (see `fingerprint`).

    key       identifies an output     names its directory; known before anything runs
    action    identifies what it is    the key, with the contents of the inputs in place of their
              made from                keys
    build_id  identifies a build       names the ledger that the build's attempts share
    content   identifies its data      users of an output with equal content are not run again
                                       (early cutoff)

Fields of a configuration that have their default value are in no digest. A changed default is
detected where an output or an unfinished build is found, as each records its full configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.identity.fingerprint import digest, without_defaults

# Fields of a result that may differ between two builds of equal data: timings and text.
NON_IDENTITY_FIELDS = ("measured", "headline", "progress")


@dataclass(frozen=True)
class Identity:
    """A node's step, version and full canonical configuration, without its inputs."""

    step: str
    version: int
    config: Any

    def to_json(self) -> dict[str, Any]:
        config = without_defaults(self.config)
        return {"step": self.step, "version": self.version, "config": config}


def key(identity: Identity, inputs: Mapping[str, str]) -> str:
    return digest({**identity.to_json(), "inputs": dict(inputs)})


def action(identity: Identity, contents: Mapping[str, str]) -> str:
    """As `key`, with the contents of the inputs in place of their keys.

    Two nodes of one action build equal outputs. `contents` has, by name, the content digest of each
    input (of a live one that is not published, the id of its build), and the listing's digest of
    each external argument, whose value is left out of the configuration.
    """
    config = without_defaults(identity.config)
    fields = {n: value for n, value in config["fields"].items() if n not in contents}
    made_from = {**identity.to_json(), "config": {"fields": fields}, "contents": dict(contents)}
    return digest(made_from)


def build_id(action: str, replaces: str, number: int = 0) -> str:
    """The id of a build; its attempts resume each other's work.

    `replaces` is the attempt of the published output that it is to replace, `number` distinguishes
    builds whose configurations differ by a changed default, see `store.builds`.
    """
    return digest([action, replaces, *([number] if number else [])])[:12]


def content(shards: Iterable[Any], result: Mapping[str, Any], opened: Mapping[str, str]) -> str:
    """The digest of an output's data; equal when no reader can find a difference.

    A shard whose result has a "content" digest is identified by it, for formats in which equal data
    can have different bytes; one whose "content" is None is not part of the data; any other is
    identified by its files. `opened` are the contents of the inputs that the artifact itself reads
    (see `Artifact.opens`), or for a reference the content of the output it refers to.
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
