"""The tasks of a step that reads documents: of a source, or of another step's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from data.read.listing import absolute, list_documents
from data.read.unit import Fields
from pipeline import External, InputError, StepContext
from pipeline.store.parallel import by_item, concurrently
from steps.artifacts import TRAIN, Documents

if TYPE_CHECKING:
    from data.prepare.items import DocumentItem
    from data.read.unit import Unit

T = TypeVar("T")
DocumentSource: TypeAlias = Annotated[Documents | str, External(list_documents, absolute)]
"""The type of a step's argument that takes another step's documents, or a source."""


def document_items(
    documents: Documents | str, fields: Fields = Fields()
) -> dict[str, DocumentItem]:
    """What each task reads, by the name of the shard that it writes, in order.

    Args:
        documents: documents, each shard of which is one item, or a source (see `data/source.py`).
        fields: names of a source's columns, and which rows to skip; documents of a step have all
            of their columns.
    """
    from data.prepare.items import DocumentItem
    from data.read.unit import small_together
    from data.read.work_units import list_units
    from data.select.split_writer import COLUMNS

    if isinstance(documents, Documents):
        items = _stored(documents, fields)
    else:
        groups = small_together(list_units(documents, fields))
        columns = (*COLUMNS, *fields.columns)
        items = [DocumentItem(((TRAIN, units),), columns) for units in groups]
    return {f"documents/{number:06d}": item for number, item in enumerate(items)}


def stored_units(documents: Documents, fields: Fields) -> list[Unit]:
    """The files of documents that have no held-out splits; `InputError` for others.

    `fields` is as in `data.prepare.items.stored_unit`.
    """
    from data.prepare.items import stored_unit

    if held_out := [name for name in documents.splits if name != TRAIN]:
        raise InputError(
            f"{documents.path}: expected documents without held-out splits, found "
            f"{', '.join(held_out)}; sample first, or give what was not sampled"
        )
    files = [file for _, file in documents.files(TRAIN)]
    return concurrently(partial(stored_unit, fields=fields), files, documents.home)


def _stored(documents: Documents, fields: Fields) -> list[DocumentItem]:
    """The shards of another step's output, without those that have no documents."""
    from data.prepare.items import DocumentItem, stored_unit
    from data.select.split_writer import COLUMNS

    parts = [files for files in documents.parts().values() if files]
    urls = [url for files in parts for url in files.values()]
    units = by_item(partial(stored_unit, fields=fields), urls, documents.home)
    return [
        DocumentItem(
            tuple((split, (units[files[split]],)) for split in documents.splits if split in files),
            (*COLUMNS, *units[next(iter(files.values()))].columns),
        )
        for files in parts
    ]


def in_groups(
    items: Iterable[T], size: Callable[[T], int], most: int, least: int = 1
) -> Iterator[list[T]]:
    """Neighbouring items in groups of about `most` together, but at least so many items."""
    group, total = list[T](), 0
    for item in items:
        total += size(item)
        if len(group) >= least and total > most:
            yield group
            group, total = [], size(item)
        group.append(item)
    if group:
        yield group


def forget(run: StepContext, *given: str) -> None:
    """Leave shards that only this step's own work needed out of the output.

    Those of these names, and all below a name that ends in a slash.
    """
    folders = tuple(name for name in given if name.endswith("/"))
    names = [name for name in run.declared if name in given or name.startswith(folders)]
    concurrently(run.drop, names, run.root)
