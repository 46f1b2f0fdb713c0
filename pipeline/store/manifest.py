"""The record that makes an output exist: `manifest.json`, written last and created if absent.

It carries the full 256-bit key (compared on every hit), every file with size and SHA-256, what the
step returned, a digest of the content, and where it came from. A manifest may own no files and
refer to another output's instead (`Origin`): an adopted output, one whose inputs turned out to have
the content they had before, the best of a sweep. A torn, foreign or future manifest is
`CorruptOutput`, never a success.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import CorruptOutput, InputError
from pipeline.identity.listing import ListedFile, Listing, Summary, files_from_bytes
from pipeline.store import decode, storage

SCHEMA = 3
_SHA256 = re.compile("[0-9a-f]{64}")
NAME = "manifest.json"
SOURCES = "sources"  # directory of listings beside it
SELECTION = "select"  # stable name of the step behind `pipeline.sweep.select`

_LIST_FROM = 4  # files


@dataclass(frozen=True)
class File:
    """One file of a shard.

    Attributes:
        path: relative to the shard's root.
        size: in bytes.
        sha256: in hex.
        blocks: CRC-32 of every MiB, 8 hex digits each; empty for a file of one block or less.
    """

    path: str
    size: int
    sha256: str
    blocks: str = ""


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
        """The inverse of `dataclasses.asdict`; raises `ValueError` on foreign or hostile input."""
        shard = decode.build(Shard, tree)
        shard.check()
        return shard

    def check(self) -> None:
        """Raises `ValueError` for what no writer of ours records: places outside, no digest."""
        try:
            if not storage.join("", self.root).startswith("/attempts/"):
                raise InputError(f"expected a directory in an attempt, got {self.root!r}")
            for file in self.files:
                storage.join("", file.path)
        except InputError as error:
            raise ValueError(str(error)) from None
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError(f"shard {self.name!r}: a file twice")
        for file in self.files:
            if file.size < 0 or not _SHA256.fullmatch(file.sha256):
                raise ValueError(f"shard {self.name!r}: {file.path}: impossible size or digest")


@dataclass(frozen=True)
class Origin:
    """The output whose files a referring manifest stands for.

    Attributes:
        kind: "adopted", "same inputs" or "selected".
        directory: its directory: a name beside the referring one, or a URL in another store.
        key: its key.
    """

    kind: str
    directory: str
    key: str


@dataclass(frozen=True)
class Manifest:
    """What was published.

    Attributes:
        key: full hex SHA-256 that identifies the output.
        step: stable name of the step function; `version` its declared version.
        label: what people call the step.
        config: canonical configuration (see `fingerprint.canonical`).
        inputs: argument name -> {"key", "directory", "digest"} of the artifact that was read; the
            directory is a name beside this output's own, or a URL in another store.
        shards: every finished part, in order of name.
        result: the JSON mapping the step returned.
        content, recipe, build: see `pipeline.identity.digests`.
        attempt: the attempt that published.
        started: Unix time in seconds; `seconds`: wall time of the publishing attempt.
        provenance: git commit, source digests, package versions (see `provenance.py`).
        origin: whose files these are, when they are not this output's own.
        sources: what each external argument stood for; `source_files` has the files.
    """

    key: str
    step: str
    version: int
    label: str
    config: Any
    inputs: dict[str, dict[str, str]]
    shards: tuple[Shard, ...]
    result: dict[str, Any]
    content: str
    recipe: str
    attempt: str
    started: float
    seconds: float
    provenance: dict[str, Any]
    build: str = ""
    origin: Origin | None = None
    sources: dict[str, Summary] = field(default_factory=dict)
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
    def size(self) -> int:
        """Total size of its files in bytes."""
        return sum(shard.bytes for shard in self.shards)

    def home(self, path: str) -> str:
        """The directory its shards are in, when the manifest itself is in directory `path`."""
        return path if self.origin is None else beside(path, self.origin.directory)

    def to_bytes(self) -> bytes:
        """JSON for `load`; `ponente show` is for people."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()


def beside(path: str, directory: str) -> str:
    """The directory a manifest in `path` means by `directory`: a sibling's name, or a URL."""
    return directory if "/" in directory else storage.join(path.rpartition("/")[0], directory)


def keep_sources(path: str, listings: Mapping[str, Listing]) -> dict[str, Summary]:
    """Write the files of listings into the step directory `path`; returns what to record."""
    for listing in listings.values():
        if listing.files:
            url = storage.join(path, SOURCES, f"{listing.digest}.json")
            storage.create(url, listing.to_bytes())
    return {name: listing.summary for name, listing in listings.items()}


def source_files(path: str, summary: Summary) -> tuple[ListedFile, ...] | None:
    """The files of a listing recorded in the step directory `path`; None if they are not there."""
    try:
        return files_from_bytes(
            storage.read_bytes(storage.join(path, SOURCES, f"{summary.digest}.json"))
        )
    except (FileNotFoundError, ValueError, TypeError, InputError):
        return None


def chosen(path: str, manifest: Manifest) -> tuple[str, Manifest]:
    """Directory and manifest of the candidate that a selection chose; any other output's own.

    Raises:
        CorruptOutput: when the candidate is not there any more.
    """
    while manifest.step == SELECTION and manifest.origin is not None:
        name = f"candidates[{manifest.result['selected']['index']}]"
        # Not the origin: a candidate may itself refer to files whose inputs nobody keeps. Only an
        # adopted selection may not say what it chose from.
        read = manifest.inputs.get(name)
        winner = beside(path, read["directory"] if read else manifest.origin.directory)
        found = load(winner)
        if found is None:
            raise CorruptOutput(f"{winner}: {name} that {path} chose is gone; run again")
        path, manifest = winner, found
    return path, manifest


def load(path: str) -> Manifest | None:
    """The manifest in the step directory `path`; None when nothing was published there.

    Raises:
        CorruptOutput: when the object there is torn, foreign or of a later schema.
    """
    return parse(storage.join(path, NAME))


def parse(url: str) -> Manifest | None:
    """The manifest in the object `url`; see `load`."""
    try:
        tree = storage.read_json(url)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptOutput(
            f"{url}: not JSON ({error}); move the directory away and run again"
        ) from error
    try:
        schema = tree.get("schema") if isinstance(tree, dict) else None
        if type(schema) is int and schema != SCHEMA:
            raise CorruptOutput(
                f"{url}: schema {schema}, this version reads {SCHEMA}; "
                "move the directory away and run again"
            )
        if isinstance(tree, dict):
            tree.setdefault("sources", {})  # manifests of steps without any may lack it
        manifest = decode.build(Manifest, tree)
        for shard in manifest.shards:
            shard.check()
        for name, reference in manifest.inputs.items():
            if set(reference) != {"key", "directory", "digest"}:
                raise ValueError(f"input {name}: wrong fields: {sorted(reference)}")
        if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
            raise ValueError("a shard twice")
        return manifest
    except ValueError as error:
        raise CorruptOutput(
            f"{url}: not a manifest of ours ({error!r}); move the directory away and run again"
        ) from error


def load_verified(path: str, key: str) -> Manifest | None:
    """The manifest at `path` if it was published for `key` and every file has its size.

    Raises:
        CorruptOutput: naming the first thing that is not as recorded.
    """
    manifest = load(path)
    if manifest is None:
        return None
    if manifest.key != key:
        raise CorruptOutput(f"{path}: published for key {manifest.key}, expected {key}")
    check_sizes(
        manifest.home(path), manifest.shards, f"build it again with --force {manifest.label}"
    )
    return manifest


def load_built(path: str, key: str, replaces: str) -> Manifest | None:
    """`load_verified`, but never the output of attempt `replaces`, which is to be replaced.

    Raises:
        CorruptOutput: when what is there is not what was recorded, and nothing is to be replaced.
    """
    try:
        found = load_verified(path, key)
    except CorruptOutput:
        if replaces:
            return None
        raise
    return found if found is not None and found.attempt != replaces else None


def check_sizes(home: str, shards: Iterable[Shard], remedy: str) -> None:
    """Raises `CorruptOutput` when a file of these shards has not the size that was recorded."""
    for shard in shards:
        listed = _listed(home, shard)
        for file in shard.files:
            url = file_url(home, shard, file)
            # A listing may lag behind: whatever it seems to lack is asked for.
            found = file.size if listed.get(file.path) == file.size else storage.size(url)
            if found != file.size:
                state = "missing" if found is None else f"{found} bytes"
                raise CorruptOutput(f"{url}: expected {file.size} bytes, found {state}; {remedy}")


def _listed(home: str, shard: Shard) -> dict[str, int]:
    """Sizes by path where one listing takes fewer requests than asking for every file."""
    if storage.is_local(home) or len(shard.files) < _LIST_FROM:
        return {}
    return dict(storage.list_files(storage.join(home, shard.root)))


def file_url(home: str, shard: Shard, file: File) -> str:
    """Where a file is. Raises `CorruptOutput` for a record that points out of its directory."""
    try:
        return storage.join(home, shard.root, file.path)
    except InputError as error:
        raise CorruptOutput(f"{home}: shard {shard.name!r}: {error}") from error
