"""Copies of outputs of other stores, so that no output depends on a store that others clean.

A copy has the key, content and directory name of the original, and its own files. It is made under
the lease of its directory and entered in a ledger, so one that was killed continues where it ended.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from msgspec.structs import replace

from pipeline.errors import CorruptOutput, InputError
from pipeline.identity import digests
from pipeline.store import lease, left_overs, manifest, outputs, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, make_ref, resolve_ref
from pipeline.store.parallel import concurrently
from pipeline.store.shards import ATTEMPTS, File, Shard, file_url, keep_shards

_CHUNK = 1 << 22


def is_elsewhere(prefix: str, path: str) -> bool:
    return path.rpartition("/")[0] != prefix


def bring_home(prefix: str, path: str, theirs: Manifest) -> tuple[str, Manifest]:
    """A copy, in the store at `prefix`, of the output in `path` of another one and what it needs.

    Returns (URL of its directory, its manifest). `CorruptOutput` when a file or a needed input is
    gone or differs from what was recorded, `InputError` when the store has other content under this
    key.
    """
    if not is_elsewhere(prefix, path):
        return path, theirs
    here = storage.join(prefix, path.rpartition("/")[2])
    held = lease.acquire(
        here,
        published=lambda: manifest.load_keyed(here, theirs.key) is not None,
        waiting=lambda _: None,
    )
    if held is not None:
        try:
            record = _copied(here, path, theirs, f"{held.number:06d}-{uuid.uuid4().hex[:8]}")
            storage.create(storage.join(here, manifest.NAME), record.to_bytes())
            outputs.remember(here, record.action, record.key)
            left_overs.tidy(here, held, record.attempt, lost=False)
        finally:
            held.release()
    found = manifest.load_verified(here, theirs.key)
    if found is None:
        raise CorruptOutput(f"{here}: the copy of {path} was deleted; run again")
    if found.content != theirs.content:
        raise InputError(
            f"{here}: has other content than {path}, which was to be copied there under the same "
            f"key; build what reads it again (--force), or refer to the other store with --link"
        )
    return here, found


def _copied(here: str, path: str, theirs: Manifest, attempt: str) -> Manifest:
    inputs = {name: _input(here, path, theirs, name) for name in theirs.inputs}
    for summary in theirs.sources.values():
        name = storage.join(manifest.SOURCES, f"{summary.digest}.json").lstrip("/")
        if manifest.source_files(path, summary) is not None:
            storage.create(storage.join(here, name), storage.read_bytes(storage.join(path, name)))
    record = replace(
        theirs,
        inputs=inputs,
        attempt=attempt,
        alias=None,
        provenance={**theirs.provenance, "copied_from": path},
    )
    if theirs.alias is not None and (chosen := inputs.get(theirs.alias.input)) is not None:
        # A selection refers to the candidate that it chose, which was copied with what it needs.
        winner = resolve_ref(here, chosen["directory"])
        if (found := manifest.load(winner)) is not None:
            alias = replace(theirs.alias, directory=make_ref(here, found.home(winner)))
            return replace(record, alias=alias, shards=found.shards)
    build = digests.digest([theirs.key, theirs.attempt, theirs.content])[:12]
    ledger, home = Ledger(here, build), theirs.home(path)
    finished = ledger.finished()

    def copy(shard: Shard) -> Shard:
        known = finished.get(shard.name)
        if known is not None and (known.files, known.result) == (shard.files, shard.result):
            return known
        directory = storage.join(here, ATTEMPTS, attempt, "shards", shard.name)
        for file in shard.files:
            url = file_url(home, shard, file)
            _copy_file(url, storage.join(directory, file.path), file)
        return ledger.add(shard.name, directory, shard.result, shard.files, replace=True)

    copies = concurrently(copy, theirs.shards, here if storage.is_local(home) else home)
    moved = [(old.root, new.root) for old, new in zip(theirs.shards, copies, strict=True)]
    return replace(
        record,
        shards=keep_shards(here, attempt, copies),
        result={**theirs.result, **_headline(theirs.result, moved)},
    )


def _input(here: str, path: str, theirs: Manifest, name: str) -> dict[str, str]:
    read = theirs.inputs[name]
    there = resolve_ref(path, read["directory"])
    if theirs.needs is not None and name not in theirs.needs:
        return {**read, "directory": make_ref(here, there)}
    found = manifest.load_keyed(there, read["key"])
    if found is not None and found.content == read["digest"]:
        there, _ = bring_home(here.rpartition("/")[0], there, found)
    elif theirs.needs is not None:
        raise CorruptOutput(f"{there}: gone, or built again with other content; {path} needs it")
    return {**read, "directory": make_ref(here, there)}


def _copy_file(source: str, target: str, file: File) -> None:
    digest = hashlib.sha256()
    try:
        with storage.open_read(source) as old, storage.open_write(target) as new:
            while block := old.read(_CHUNK):
                digest.update(block)
                new.write(block)
    except FileNotFoundError:
        raise CorruptOutput(f"{source}: gone while its output was copied; run again") from None
    if digest.hexdigest() != file.sha256:
        raise CorruptOutput(
            f"{source}: other bytes than were recorded, so its output is not copied; build it "
            "again there, or run without that store"
        )


def _headline(result: dict[str, Any], moved: list[tuple[str, str]]) -> dict[str, Any]:
    lines = [str(line) for line in result.get("headline", ())]
    for old, new in moved:
        lines = [line.replace(old, new) if manifest.OUTPUT in line else line for line in lines]
    return {"headline": lines} if lines else {}
