"""Where a document of a step came from: the file of a source and the row in it.

A shard of documents names neither. But what each task read follows from the source's files and the
step's settings, which are recorded: the task's units are derived again, through every step between
the tokens and the source, and the document is found in them by its id.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pipeline import InputError, StepContext
from pipeline.errors import CorruptOutput
from pipeline.identity.fingerprint import plain
from pipeline.store.manifest import chosen, load, source_files
from pipeline.store.shards import Shard
from steps.artifacts import TRAIN, Documents, Tokenizer

if TYPE_CHECKING:
    from data.read.unit import Fields, Unit

_COLUMNS = ("text", "id", "score", "skip_nulls", "skip_invalid", "columns")


@dataclass(frozen=True)
class Origin:
    """Where a document is: by the id of the documents that were tokenised, if they have one.

    `file` and `row` (from 0) are of the source; else of the last output that has it, and `why` says
    so. `place` is the same in the words of errors, with the byte of a line or the row group.
    """

    id: str | None
    file: str
    row: int | None
    place: str
    why: str = ""


def settings_of(artifact: Any) -> dict[str, Any]:
    """The recorded arguments of an artifact's step, as plain values."""
    return plain(chosen(artifact.path, artifact.manifest)[1].config)


def check_source(artifact: Any, source: str) -> None:
    """Refuse, with `InputError`, a source whose files are not those that a step read."""
    from data.read.work_units import list_files

    path, manifest = chosen(artifact.path, artifact.manifest)
    for summary in (found for name, found in manifest.sources.items() if name != "template"):
        read = None if summary.pinned else source_files(path, summary)
        if read is not None and not _same(list_files(source), read):
            raise InputError(f"{source}: its files are not those that {manifest.label} read")


def _same(now: list[tuple[str, int]], read: Collection[Any]) -> bool:
    pairs = zip(now, sorted(read, key=lambda file: file.name), strict=False)
    equal = all(url.endswith(f.name) and size == f.size for (url, size), f in pairs)
    return len(now) == len(read) and equal


def origins(documents: Documents, name: str, ids: Collection[str]) -> dict[str, Origin]:
    """By id, where documents of the training split of a shard came from.

    An id that is not found is left out. Raises `InputError` or `CorruptOutput` where the source has
    changed, or an output in between is gone.
    """
    from data.read.locate import find_ids

    units, above = _read_by(documents, name)
    wanted = set(ids)
    places = find_ids(units, wanted | {_before(each) for each in wanted})
    found: dict[str, Origin] = {}
    if above is None:
        for own, rows in places.items():
            first, count = rows[0], len(rows)
            why = f"the first of {count} rows of this id" if count > 1 else ""
            found[own] = Origin(own, first.file, first.row, first.text, why)
    else:
        files = {url: shard for shard, url in above.files(TRAIN)}
        shards: dict[str, set[str]] = {}
        for own, rows in places.items():
            shards.setdefault(files[rows[0].file], set()).add(own)
        for shard, own in shards.items():
            found |= origins(above, shard, own)
    by = {each: found.get(each) or found.get(_before(each)) for each in wanted}
    return {own: origin for own, origin in by.items() if origin is not None}


def _before(own: str) -> str:
    """The id of the document that a map made several of."""
    above, _, number = own.rpartition("/")
    return above if number.isdigit() else own


@functools.lru_cache(maxsize=4096)
def _read_by(documents: Documents, name: str) -> tuple[list[Unit], Documents | None]:
    """The units that the task of a shard read for training, and of which documents they are, if
    any."""
    from steps.documents.items import stored_units

    of_sample = name.startswith("sample/")
    number, above = int(name.rpartition("/")[2]), _above(documents)
    if above is None:
        return list(_groups(documents, of_sample)[number]), None
    if of_sample:
        from data.read.unit import small_together

        units = stored_units(above, fields_of(documents))
        return list(list(small_together(units))[number]), above
    from data.prepare.items import stored_unit

    files = [parts for parts in above.parts().values() if parts][number]
    return [stored_unit(files[TRAIN])] if TRAIN in files else [], above


def _above(documents: Documents) -> Documents | None:
    """The documents that a step read; None if it read a source."""
    path = documents.input_paths.get("source", documents.input_paths.get("documents"))
    if path is None:
        return None
    if (published := load(path)) is None:
        raise CorruptOutput(f"{path}: {documents.path} was made from this output, which is gone")
    return Documents(path, published)


@functools.lru_cache(maxsize=8)
def _groups(documents: Documents, of_sample: bool) -> list[tuple[Unit, ...]]:
    """The units of each task that read a source, in order."""
    from data.read.unit import small_together
    from data.read.work_units import list_units

    settings, fields = settings_of(documents), fields_of(documents)
    source = settings["source" if of_sample else "documents"]
    check_source(documents, source)
    if of_sample and settings["unit"] == "row_group":
        return [item.units for item in _chosen_again(documents, source, fields, settings)]
    return list(small_together(list_units(source, fields)))


def fields_of(documents: Documents) -> Fields:
    """The names of a source's columns, as a step that read it was given them."""
    from data.read.unit import Fields

    settings = settings_of(documents)
    given = settings if "unit" in settings else settings.get("fields", {})
    known: dict[str, Any] = {name: given[name] for name in _COLUMNS if name in given}
    known["columns"] = tuple(known.get("columns", ()))
    return Fields(**known)


def id_in_source(documents: Documents, place: tuple[str, int]) -> str | None:
    """The id of a row of the source that documents are of; None if the file is not of it."""
    from data.read.locate import id_of_row
    from data.read.work_units import list_files

    while (above := _above(documents)) is not None:
        documents = above
    settings = settings_of(documents)
    source = settings["source"] if "source" in settings else settings["documents"]
    check_source(documents, source)
    if place[0] not in [url for url, _ in list_files(source)]:
        return None
    return id_of_row(*place, fields_of(documents))


def _chosen_again(documents: Documents, source: str, fields: Fields, settings: Any) -> list[Any]:
    """The items of `sample(unit="row_group")`, chosen again from the counts that it recorded."""
    from data.select.token_budget import Budget
    from steps.documents.sample_choice import Request, choose_row_groups
    from steps.documents.sample_shards import Filter

    tokenizer = None
    if path := documents.input_paths.get("tokenizer"):
        if (published := load(path)) is None:
            raise CorruptOutput(f"{path}: {documents.path} was made with this output, now gone")
        tokenizer = Tokenizer(path, published)
    splits = tuple((name, tokens) for name, tokens in settings["splits"])
    request = Request(
        cast(StepContext, _Recorded(documents)),
        source,
        tokenizer,
        Budget(train=settings["tokens"], splits=splits),
        Filter(settings["seed"], settings["min_score"], settings["drop_duplicates"]),
        fields,
    )
    return choose_row_groups(request).items


class _Recorded:
    """Stands for the attempt of a finished step: `map` gives the shards that it recorded."""

    def __init__(self, documents: Documents) -> None:
        self._documents, self.root = documents, documents.home

    def map(self, writer: Any, items: Any) -> dict[str, Shard]:
        del writer
        return {name: self._documents.manifest.shard(name) for name in items}
