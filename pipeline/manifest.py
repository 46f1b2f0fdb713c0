"""The record that makes an output exist: `manifest.json`, written last and created if absent.

It carries the full 256-bit key (compared on every hit), every file with size and SHA-256, what the
step returned, and where it came from. A torn, foreign or future manifest is `DamagedOutput`, never
a success.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pipeline import storage
from pipeline.errors import DamagedOutput

SCHEMA = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class File:
    """One file of a shard: path relative to the shard's root, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A finished part of an output.

    Attributes:
        name: logical name, such as "train/00003".
        root: directory of its files, relative to the step's directory (inside some attempt).
        files: everything under `root`.
        result: the JSON mapping its writer returned (counts and the like).
    """

    name: str
    root: str
    files: tuple[File, ...]
    result: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    @staticmethod
    def from_json(tree: dict[str, Any]) -> Shard:
        """The inverse of `dataclasses.asdict`; raises KeyError or TypeError on foreign input."""
        files = tuple(File(**file) for file in tree["files"])
        return Shard(tree["name"], tree["root"], files, dict(tree["result"]))


@dataclass(frozen=True)
class Manifest:
    """What was published.

    Attributes:
        key: full hex SHA-256 that identifies the output.
        step: stable name of the step function; `version` its declared version.
        label: what people call the step.
        config: canonical configuration (see `fingerprint.canonical`).
        inputs: argument name -> {"key", "directory", "digest"} of the artifact that was read; the
            directory is beside this output's own.
        shards: every finished part, in order of name.
        result: the JSON mapping the step returned.
        attempt: the attempt that published.
        started: Unix time in seconds; `seconds`: wall time of the publishing attempt.
        provenance: git commit, source digests, package versions (see `provenance.py`).
    """

    key: str
    step: str
    version: int
    label: str
    config: Any
    inputs: dict[str, dict[str, str]]
    shards: tuple[Shard, ...]
    result: dict[str, Any]
    attempt: str
    started: float
    seconds: float
    provenance: dict[str, Any]
    schema: int = SCHEMA

    def shard(self, name: str) -> Shard:
        """The shard of that name. Raises `KeyError` listing what there is."""
        for shard in self.shards:
            if shard.name == name:
                return shard
        raise KeyError(
            f"no shard {name!r} in {self.label}; there are {[s.name for s in self.shards]}"
        )

    @property
    def digest(self) -> str:
        """SHA-256 over names, sizes and digests of all files: equal when the content is equal."""
        lines = [f"{s.name}/{f.path} {f.size} {f.sha256}" for s in self.shards for f in s.files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """Indented JSON, for people as much as for `load`."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True).encode()


def load(path: str) -> Manifest | None:
    """The manifest in the step directory `path`; None when nothing was published there.

    Raises:
        DamagedOutput: when the object there is torn, foreign or of a later schema.
    """
    url = storage.join(path, NAME)
    try:
        tree = storage.read_json(url)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedOutput(
            f"{url}: not JSON ({error}); move the directory away and run again"
        ) from error
    try:
        if tree["schema"] != SCHEMA:
            raise DamagedOutput(f"{url}: schema {tree['schema']}, this version reads {SCHEMA}")
        shards = tuple(Shard.from_json(shard) for shard in tree.pop("shards"))
        return Manifest(shards=shards, **tree)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedOutput(
            f"{url}: not a manifest of ours ({error!r}); move the directory away and run again"
        ) from error


def load_verified(path: str, key: str) -> Manifest | None:
    """The manifest at `path` if it was published for `key` and every file has its size.

    Raises:
        DamagedOutput: naming the first thing that is not as recorded.
    """
    manifest = load(path)
    if manifest is None:
        return None
    if manifest.key != key:
        raise DamagedOutput(f"{path}: published for key {manifest.key}, expected {key}")
    for shard in manifest.shards:
        for file in shard.files:
            url = storage.join(path, shard.root, file.path)
            found = storage.size(url)
            if found != file.size:
                state = "missing" if found is None else f"{found} bytes"
                raise DamagedOutput(
                    f"{url}: expected {file.size} bytes, found {state}; "
                    f"delete {path} to build it again"
                )
    return manifest
