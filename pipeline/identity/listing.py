"""External locations: their files at one moment, or a revision that pins them.

    @step(output=Documents, version=1)
    def sample(run: StepContext, source: Annotated[str, External(list_source, absolute)]) -> Result:

Each command lists a location once, and the digest of the `Listing` replaces it in the action
digest: the same files in another folder give the same one, other files under one name another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pipeline.identity import fingerprint

_NAMED = 4  # files named in a message
_COMMIT = 12  # hexadecimal digits of a revision in a message


@dataclass(frozen=True)
class ListedFile:
    """One file, by its path relative to the folder that all files of the listing share.

    `digest` is that of its content, where the store has one or reading the file is cheap, else
    empty. After a `+` follows one of all bytes, where it is known of a file that is digested by
    samples.
    """

    name: str
    size: int
    digest: str = ""


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listing without its files, as a manifest records it."""

    digest: str
    files: int
    bytes: int
    where: str
    pinned: str
    branch: str
    revision: str

    def __str__(self) -> str:
        if self.pinned:
            return f"{self.where}, pinned to {self.pinned}"
        at = f", {self.branch} at {self.revision}" if self.revision else ""
        return (
            f"{self.where}{at}: {self.files:,} file{'s' * (self.files != 1)}, "
            f"{_megabytes(self.bytes)}, listing {self.digest[:_COMMIT]}"
        )


@dataclass(frozen=True)
class Listing:
    """The files of a location.

    Attributes:
        files: sorted by name; empty when the location is pinned and was not listed.
        pinned: an immutable revision, such as a full commit; empty when the content can change.
        branch, revision: the branch that was resolved, if any, and the commit that it points to.
        skipped: names that the location matches and a step does not read, such as folders.
        limit: upper bound of its bytes, where that is known and its files are not.
    """

    where: str
    files: tuple[ListedFile, ...] = ()
    pinned: str = ""
    branch: str = ""
    revision: str = ""
    skipped: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def most_bytes(self) -> int | None:
        """Upper bound of its total size in bytes; None where it is not known."""
        return sum(file.size for file in self.files) if self.files else self.limit

    @property
    def digest(self) -> str:
        """SHA-256 of names, sizes and digests; for a pinned location, of its name and revision."""
        if self.pinned:
            return fingerprint.digest({"where": self.where, "pinned": self.pinned})
        return fingerprint.digest([[f.name, f.size, f.digest] for f in self.files])

    @property
    def summary(self) -> Summary:
        total = sum(file.size for file in self.files)
        more = (self.where, self.pinned, self.branch, self.revision)
        return Summary(self.digest, len(self.files), total, *more)

    def same_as(self, files: tuple[ListedFile, ...] | None) -> bool:
        """Whether the files that were listed before, if known, are these as far as can be told."""
        if files is None or self.pinned or len(files) != len(self.files):
            return False
        return all(
            (old.name, old.size) == (new.name, new.size)
            and (old.digest == new.digest or old.digest.startswith(f"{new.digest}+"))
            for old, new in zip(files, self.files, strict=True)
        )

    def to_bytes(self) -> bytes:
        return json.dumps([asdict(file) for file in self.files], sort_keys=True).encode()


@dataclass(frozen=True)
class External:
    """Marks an external argument: `Annotated[str, External(...)]`; a value of None has no listing.

    `list` returns the current listing of a value, and raises `PonenteError` or `OSError` when there
    is no answer within so many seconds; `absolute` makes of a value the one in the key and for the
    body.
    """

    list: Callable[[Any, float], Listing]
    absolute: Callable[[Any], Any] = lambda value: value


def files_from_bytes(data: bytes) -> tuple[ListedFile, ...]:
    """The inverse of `Listing.to_bytes`; `ValueError` or `TypeError` for other data."""
    return tuple(ListedFile(**tree) for tree in json.loads(data))


def difference(old: Summary, files: tuple[ListedFile, ...] | None, new: Listing) -> str:
    """The changes from a recorded listing, with its files if known, to `new`, in a line."""
    now = new.summary
    if old.pinned or new.pinned:
        return f"{old} -> {now}"
    moved = ""
    if old.revision and new.revision and old.revision != new.revision:
        moved = f"moved {new.branch} from {old.revision[:_COMMIT]} to {new.revision[:_COMMIT]}"
    if files is None:
        parts = [f"{old.files:,} files, {_megabytes(old.bytes)}"]
        parts = [f"{parts[0]} -> {now.files:,} files, {_megabytes(now.bytes)}"]
    else:
        parts = _differences({f.name: f for f in files}, {f.name: f for f in new.files})
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return ": ".join(part for part in (moved, ", ".join(parts[:_NAMED]) + more) if part)


def _differences(old: dict[str, ListedFile], new: dict[str, ListedFile]) -> list[str]:
    changed = [
        f"{name} {_change(old[name], new[name])}"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]
    added = [f"+ {name}" for name in sorted(new.keys() - old.keys())]
    return changed + added + [f"- {name}" for name in sorted(old.keys() - new.keys())]


def _change(old: ListedFile, new: ListedFile) -> str:
    before, after = _megabytes(old.size), _megabytes(new.size)
    if old.size == new.size:
        return f"has other content ({after})"
    if before == after:
        before, after = f"{old.size:,} bytes", f"{new.size:,} bytes"
    return f"{before} -> {after}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"
