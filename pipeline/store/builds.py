"""The build of an output that an attempt belongs to: never one begun with other default values.

A build's id is a digest of its action and of the output it replaces. Actions leave out fields that
have their default value, so every build records the full configurations of its attempts, and an
attempt whose configuration conflicts with them belongs to another build. A field added since is no
conflict; a run that finds an output without it records the field.

A build also records the source files of each code of the step that worked on it. `--force` gives up
an unfinished build and begins another one; a mark keeps later attempts from going back, and another
one, in a build that `--force` began, keeps `--force` from giving that up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CorruptOutput
from pipeline.identity import digests, fingerprint
from pipeline.store import storage
from pipeline.store.ledger import DIRECTORY, Ledger, Record
from pipeline.store.manifest import Manifest

# Suffix of a recorded configuration; no shard's record ends with it.
_ENDING = "-.configuration"
_CODE = "-.code"  # after the digest of the code
_GIVEN_UP, _BEGUN = "given-up-.force", "begun-.force"
_NAMED = 5  # files named in a line


@dataclass(frozen=True)
class Build:
    """A build of an output.

    Attributes:
        conflicts: why an unfinished build is not resumed: one line per field that differs.
        given_up: id of an unfinished build that `--force` gives up; empty for none.
    """

    id: str
    conflicts: tuple[str, ...] = ()
    given_up: str = ""


def find_build(
    root: str,
    action: str,
    replaces: str,
    config: Any,
    contents: Collection[str] = (),
    *,
    forced: bool = False,
    claim: bool = False,
) -> Build:
    """The build in the step directory `root` that an attempt with this configuration belongs to.

    Args:
        replaces: attempt of the published output that is to be replaced; empty for none.
        contents: names of the arguments that `action` has by content; their values may differ.
        forced: give up an unfinished build, unless `--force` began it, which then resumes it.
        claim: record the configuration in the build, which one is given up, and whether `forced`
            begins it.
    """
    conflicts: tuple[str, ...] = ()
    given_up, number = "", -1
    while True:
        build = digests.build_id(action, replaces, number := number + 1)
        directory = storage.join(root, DIRECTORY, build)
        names = storage.list_names(directory)
        if _GIVEN_UP in names:
            forced = False
        elif found := tuple(_differences(directory, names, config, contents)):
            conflicts = conflicts or found
        elif forced and _BEGUN not in names and any(name.endswith(".json") for name in names):
            given_up, forced = build, False
        elif claim and (found := tuple(_claim(root, build, given_up, forced, config, contents))):
            conflicts = conflicts or found
        else:
            return Build(build, conflicts, given_up)


def _claim(
    root: str, build: str, given_up: str, begun: bool, config: Any, contents: Collection[str]
) -> Iterator[str]:
    if given_up:
        mark = storage.join(root, DIRECTORY, given_up, _GIVEN_UP)
        storage.create(mark, b"", durable=False)
    if begun:
        storage.create(storage.join(root, DIRECTORY, build, _BEGUN), b"", durable=False)
    _record(root, build, config)
    # Checked again after recording: a driver with other defaults may have claimed it meanwhile.
    directory = storage.join(root, DIRECTORY, build)
    return _differences(directory, storage.list_names(directory), config, contents)


def claim_code(ledger: Ledger, code: Mapping[str, Any]) -> None:
    if ledger.code:
        url = storage.join(ledger.directory, ledger.code + _CODE)
        storage.create(url, json.dumps(code).encode(), durable=False)


def other_codes(ledger: Ledger) -> list[dict[str, Any]]:
    """The source files of each other code that worked on the build, as `claim_code` wrote them."""
    codes = (name.removesuffix(_CODE) for name in ledger.names() if name.endswith(_CODE))
    return [_read_code(ledger, code) for code in sorted(codes) if code != ledger.code]


@dataclass(frozen=True)
class OtherCode:
    """Shards of a build that were written by other code than the step's code is now.

    `unknown` are those whose record does not say what code wrote them; `files` names the source
    files that differ.
    """

    shards: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    files: str = ""

    def with_(self, other: OtherCode) -> OtherCode:
        return OtherCode(
            self.shards + other.shards, self.unknown + other.unknown, other.files or self.files
        )

    @property
    def code(self) -> str:
        return f"other code ({self.files})" if self.files else "other code"

    @property
    def continued(self) -> str:
        return f"continues from what {self.code} wrote"

    def lines(self, of: int, *, keep: bool) -> tuple[list[str], list[str]]:
        """(lines on shards that are kept, on those that are built again), of `of` shards."""
        kept: list[str] = []
        again: list[str] = []
        if self.shards:
            what = "kept (--keep-shards)" if keep else "built again"
            line = f"{len(self.shards)} of {of} shards were built by {self.code}: {what}"
            (kept if keep else again).append(line)
        if self.unknown:
            kept.append(
                f"{len(self.unknown)} of {of} shards were built by an earlier version, which did "
                "not record their code: kept; --force builds them again"
            )
        return kept, again


def is_mixed(ledger: Ledger) -> bool:
    """Whether code other than the ledger's worked on the build; by a listing."""
    codes = {name for name in ledger.names() if name.endswith(_CODE)}
    return codes != {ledger.code + _CODE}


def other_code(
    ledger: Ledger, records: Mapping[str, Record], sources: Mapping[str, Any] | None = None
) -> OtherCode:
    """Which of these records are of other code than the ledger's.

    `sources` are the files of the ledger's code, for a build that it has not claimed.
    """
    if not ledger.code:
        return OtherCode()
    codes = {record.code for record in records.values()} - {"", ledger.code}
    files: set[str] = set()
    if codes:
        now = sources or _read_code(ledger, ledger.code).get("sources", {})
        for code in codes:
            then = _read_code(ledger, code).get("sources") or {}
            names = then.keys() | now.keys() if then else ()
            files |= {n for n in names if then.get(n, [0, 0])[1] != now.get(n, [0, 0])[1]}
    return OtherCode(
        tuple(name for name, record in records.items() if record.code in codes),
        tuple(name for name, record in records.items() if not record.code),
        named(sorted(files)),
    )


def named(files: Sequence[str]) -> str:
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return ", ".join(files[:_NAMED]) + more


def _read_code(ledger: Ledger, code: str) -> dict[str, Any]:
    try:
        tree = storage.read_json(storage.join(ledger.directory, code + _CODE))
    except (FileNotFoundError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def changed_defaults(
    path: str, published: Manifest, config: Any, contents: Collection[str] = ()
) -> list[str]:
    """Differences between the configurations of a published output and of a node of its key."""
    if fingerprint.same(published.config, config):
        return []
    lines = _difference(published.config, config, contents)
    # The manifest lacks fields added since; `confirm` recorded their defaults next to the build.
    directory = storage.join(path, DIRECTORY, published.build)
    return lines or list(_differences(directory, storage.list_names(directory), config, contents))


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


def _differences(
    directory: str, names: Iterable[str], config: Any, contents: Collection[str]
) -> Iterator[str]:
    for name in names:
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
