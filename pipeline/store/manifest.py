"""The record that makes an output exist: `manifest.json`, written last and created if absent.

A manifest may own no files and refer to those of another output (`Alias`): an adopted output, one
made before from inputs of the same content, the best candidate of a sweep.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import msgspec

from pipeline.errors import CorruptOutput, InputError, PonenteError
from pipeline.identity.listing import ListedFile, Listing, Summary, files_from_bytes
from pipeline.store import retry, storage
from pipeline.store import shards as shard_lists
from pipeline.store.decode import Stored, decode, to_json
from pipeline.store.shards import Shard, ShardTable, Table, check_sizes

SCHEMA = 5
_READ = (4, SCHEMA)  # before 5 a manifest had all of its shards itself, and no `needs`
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # within the calendar's range
NAME = "manifest.json"
SOURCES = "sources"  # next to the manifest: directory of listings
ADOPTED, SAME_INPUTS = "adopted", "same inputs"  # kinds of aliases
RETIRED = "retired"  # manifests that a rebuild replaced
FAILURE = "failure.json"
PROCESS_LOGS = "logs"  # in an attempt: logs of the processes of a gang
KEEP = "keep"  # in an attempt: files to inspect, kept for every attempt
_LATE_SECONDS = 60.0
_NAMED = 5  # shards named in a message
_ELSEWHERE_SECONDS = 5.0  # retries of requests to another store than the output's own
_AWAY = "move the directory away and run again"

# Placeholder, in a headline, for the URL of the directory with the output's files: a store can be
# copied and moved, so a manifest never contains the URL of its own store.
OUTPUT = "{output}"


def label_of(there: Manifest) -> str:
    """Placeholder, in a headline, for the label of an output's step, which each graph chooses."""
    return f"{{{there.key}={there.label.replace('}', ')')}}}"


_LABEL = re.compile(r"\{([0-9a-f]{64})=(.*?)\}")


def fill(line: str, home: str, labels: Mapping[str, str]) -> str:
    """A line of a headline; `labels` are a graph's, by key, for those when it was built."""
    line = _LABEL.sub(lambda found: labels.get(found[1], found[2]), line)
    return line.replace(OUTPUT, home)


class Alias(Stored, frozen=True):
    """The output whose files a manifest refers to.

    Attributes:
        kind: "adopted", "same inputs" or "selected".
        directory: that output's directory: a name in the same store, or a URL in another store.
        input: name of the input that the step selected; empty unless it chose among its inputs.
        differences: differences that an adoption ignored, one line per field.
    """

    kind: str
    directory: str
    key: str
    input: str
    differences: tuple[str, ...]


class Manifest(Stored, frozen=True, rename={"action": "recipe", "alias": "origin"}):
    """The record of a published output.

    Attributes:
        key: full hex SHA-256 that identifies the output; compared on every hit.
        config: canonical configuration (see `fingerprint.canonical`).
        inputs: argument name -> {"key", "directory", "digest"} of the artifact that was read; the
            directory is a name in the same store, or a URL in another store.
        shards: sorted by name; a `ShardTable` reads them when asked.
        content, action, build: see `pipeline.identity.digests`.
        started: Unix time in seconds; `seconds`: wall time of the publishing attempt.
        provenance: see `pipeline.identity.provenance`.
        alias: the output whose files these are; None when they are this output's own.
        sources: listing of each external argument, without its files; `source_files` reads those.
        needs: names of the inputs that it cannot be used without; None for all.
    """

    key: str
    step: str
    version: int
    label: str
    config: Any
    inputs: dict[str, dict[str, str]]
    shards: Sequence[Shard]
    result: dict[str, Any]
    content: str
    action: str
    attempt: str
    started: Seconds
    seconds: Seconds
    provenance: dict[str, Any]
    build: str
    alias: Alias | None
    sources: dict[str, Summary]
    needs: tuple[str, ...] | None = None

    def shard(self, name: str) -> Shard:
        if (found := shard_lists.find(self.shards, name)) is not None:
            return found
        few = [shard.name for shard in itertools.islice(self.shards, _NAMED)]
        more = f" and {len(self.shards) - len(few)} more" if len(self.shards) > len(few) else ""
        raise KeyError(f"no shard {name!r} in {self.label}; there are {few}{more}")

    @property
    def size(self) -> int:
        if isinstance(self.shards, ShardTable):
            return self.shards.table.bytes
        return sum(shard.bytes for shard in self.shards)

    def named_paths(self) -> frozenset[str]:
        """Paths relative to the home, to recognise the output: of its table, or of its shards."""
        if isinstance(self.shards, ShardTable):
            return frozenset([self.shards.table.path])
        return frozenset(shard.root for shard in self.shards)

    def paths(self) -> frozenset[str]:
        """Paths relative to the home of all its files: its shards' directories, and its table."""
        return self.named_paths() | {shard.root for shard in self.shards}

    def home(self, path: str) -> str:
        return path if self.alias is None else resolve_ref(path, self.alias.directory)

    def to_bytes(self) -> bytes:
        shards = self.shards.table if isinstance(self.shards, ShardTable) else self.shards
        tree = msgspec.to_builtins(msgspec.structs.replace(self, shards=()))
        return to_json({**tree, "shards": shards, "schema": SCHEMA})


def resolve_ref(path: str, directory: str) -> str:
    """URL of a `directory` in the manifest in `path`: a name in the same store, or a URL."""
    return directory if "/" in directory else storage.join(path.rpartition("/")[0], directory)


def describe_inputs(
    root: str, inputs: Mapping[str, tuple[str, Manifest]]
) -> dict[str, dict[str, str]]:
    return {
        name: {"key": found.key, "directory": make_ref(root, path), "digest": found.content}
        for name, (path, found) in inputs.items()
    }


def make_ref(root: str, path: str) -> str:
    """The reference to directory `path` in a manifest in `root`; the inverse of `resolve_ref`."""
    prefix, _, name = path.rpartition("/")
    return name if prefix == root.rpartition("/")[0] else path


def keep_sources(path: str, listings: Mapping[str, Listing]) -> dict[str, Summary]:
    """Write the listings into the step directory `path`; returns `Manifest.sources`."""
    for listing in listings.values():
        if listing.files:
            url = storage.join(path, SOURCES, f"{listing.digest}.json")
            storage.create(url, listing.to_bytes())
    return {name: listing.summary for name, listing in listings.items()}


def source_files(path: str, summary: Summary) -> tuple[ListedFile, ...] | None:
    try:
        return files_from_bytes(
            storage.read_bytes(storage.join(path, SOURCES, f"{summary.digest}.json"))
        )
    except (FileNotFoundError, ValueError, TypeError, InputError):
        return None


def chosen(path: str, manifest: Manifest) -> tuple[str, Manifest]:
    """Directory and manifest of the input that a selection chose; other outputs are unchanged."""
    while manifest.alias is not None and (name := manifest.alias.input):
        # Through the input and not the alias: the chosen candidate may itself refer to an output
        # whose inputs were deleted. Only an adopted selection may lack its inputs.
        read = manifest.inputs.get(name)
        winner = resolve_ref(path, read["directory"] if read else manifest.alias.directory)
        found = load(winner)
        if found is None:
            raise CorruptOutput(f"{winner}: input {name} that {path} chose is missing; run again")
        path, manifest = winner, found
    return path, manifest


def load(path: str) -> Manifest | None:
    """The manifest in the step directory `path`; None when nothing was published there.

    Raises `CorruptOutput` when the object is truncated, foreign or of another schema.
    """
    return parse(storage.join(path, NAME), path)


def readable(path: str) -> Manifest | None:
    """As `load`, but None for a corrupt one."""
    try:
        return load(path)
    except CorruptOutput:
        return None


def parse(url: str, path: str) -> Manifest | None:
    """The manifest in the object `url`, one of the step directory `path`; see `load`."""
    try:
        tree = storage.read_json(url)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        reason = shard_lists.damage(error)
        raise CorruptOutput(f"{url}: not readable JSON ({reason}); {_AWAY}") from error
    try:
        schema = tree.pop("schema", None) if isinstance(tree, dict) else None
        if type(schema) is int and schema not in _READ:
            raise CorruptOutput(f"{url}: schema {schema}, this version reads {SCHEMA}; {_AWAY}")
        if type(schema) is not int:
            raise ValueError(f"schema {schema!r}")
        listed = tree.get("shards")
        manifest = decode(Manifest, {**tree, "shards": ()})
        for name, reference in manifest.inputs.items():
            if set(reference) != {"key", "directory", "digest"}:
                raise ValueError(f"input {name}: wrong fields: {sorted(reference)}")
            _check_directory(reference["directory"])
        if manifest.alias is not None:
            _check_directory(manifest.alias.directory)
        shards = (
            ShardTable(manifest.home(path), path.rpartition("/")[2], decode(Table, listed))
            if isinstance(listed, dict)
            else _inline(decode(tuple[Shard, ...], listed))
        )
        return msgspec.structs.replace(manifest, shards=shards)
    except ValueError as error:
        raise CorruptOutput(f"{url}: not a manifest of ours ({error!r}); {_AWAY}") from error


def _inline(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    for shard in shards:
        shard.check()
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError("duplicate shard")
    return tuple(sorted(shards, key=lambda shard: shard.name))


def _check_directory(directory: str) -> None:
    try:
        if "/" not in directory:
            storage.join("", directory)
        elif storage.normalise(directory) != directory:
            raise InputError(f"not a normal URL: {directory!r}")
    except InputError as error:
        raise ValueError(str(error)) from None


def load_keyed(path: str, key: str) -> Manifest | None:
    """The manifest at `path`, for `key` or else `CorruptOutput`; the files are not checked."""
    manifest = load(path)
    if manifest is not None and manifest.key != key:
        raise CorruptOutput(
            f"{path}: published for key {manifest.key}, expected {key}; move the directory away"
        )
    return manifest


def load_verified(path: str, key: str) -> Manifest | None:
    """As `load_keyed`; raises `CorruptOutput` also for a file without its recorded size."""
    manifest = load_keyed(path, key)
    if manifest is not None:
        check_files(path, manifest)
    return manifest


def load_late(path: str, key: str) -> Manifest | None:
    """`load_verified` of what was published: a network file system may show it a minute late."""
    end, pauses = time.monotonic() + _LATE_SECONDS * storage.is_local(path), retry.pauses(0.1, 5.0)
    while (found := load_verified(path, key)) is None and (left := end - time.monotonic()) > 0:
        time.sleep(min(next(pauses), left))
    return found


def check_files(path: str, manifest: Manifest) -> None:
    """Raise `CorruptOutput` when a file of the output, its own or an alias's, has another size.

    The error for another store than the output's own that is unreachable has a `__cause__`.
    """
    # The directory names the step, whatever its label is in the graph of today.
    home, remedy = manifest.home(path), f"build it again with --force {path.rpartition('/')[2]}"
    if manifest.alias is None:
        check_sizes(home, manifest.shards, remedy)
        return
    near = home.rpartition("/")[0] == path.rpartition("/")[0]
    try:
        with nullcontext() if near else storage.giving_up_after(_ELSEWHERE_SECONDS):
            check_sizes(home, manifest.shards, remedy)
    except CorruptOutput as error:
        raise CorruptOutput(f"{path}: refers to another output's files: {error}") from None
    except (PonenteError, OSError) as error:
        raise CorruptOutput(
            f"{path}: its files are in {home}, which cannot be read ({error}); {remedy}"
        ) from error


def load_built(path: str, key: str, replaces: str) -> Manifest | None:
    """`load_verified`, but None for the output of attempt `replaces`, which is to be replaced."""
    try:
        found = load_verified(path, key)
    except CorruptOutput:
        if replaces:
            return None
        raise
    return found if found is not None and found.attempt != replaces else None
