"""Removes from documents what evaluation sets contain too, and reports how much it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from data.read.unit import Fields
from models.shape.validation import at_least
from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from pipeline.store.shards import Shard
from steps.artifacts import Documents
from steps.documents.evaluation_texts import EvaluationTexts, evaluation_texts, harness_texts
from steps.documents.facts import source_license
from steps.documents.items import DocumentSource, document_items, forget
from steps.documents.result import documents_result
from steps.gang import HUB

_TABLE = "ngrams/table"
_EXAMPLES = 5  # of an evaluation set


def decontaminate(
    documents: Documents | str,
    against: Sequence[EvaluationTexts | str] | EvaluationTexts | str,
    *,
    ngram: int = 13,
    remove: Literal["document", "span"] = "document",
    least: int = 8,
    margin: int = 200,
    shortest: int = 200,
    pieces: int = 10,
    fields: Fields = Fields(),
) -> Documents:
    """Documents without those, or without their parts, that share an n-gram of words with a set.

    Words have no case, no accents and no punctuation (`data/prepare/words.py`).

    Args:
        documents: documents, or a source.
        against: evaluation sets. A string with a "/" or a "." names files (`evaluation_texts`), any
            other one a task of lm-evaluation-harness (`harness_texts`).
        ngram: words of an n-gram.
        remove: "document" drops a document with an n-gram of a set; "span" removes the n-gram with
            `margin` characters on either side, and what is left are documents of their own. The
            result's `cut` counts the documents, their pieces, and the tokens that were removed.
        least: a text of an evaluation set with fewer than `ngram` words is an n-gram as a whole if
            it has at least `least`; one with fewer is not looked for, which the result counts.
        shortest: characters of the shortest piece that "span" keeps.
        pieces: most pieces that "span" cuts a document into; it drops documents of more.
        fields: names of a source's columns, and which others to keep.
    """
    given = (against,) if isinstance(against, str) or not isinstance(against, Sequence) else against
    sets = tuple(_texts(each) if isinstance(each, str) else each for each in given)
    return remove_contamination(
        documents,
        sets,
        ngram=ngram,
        remove=remove,
        least=least,
        margin=margin,
        shortest=shortest,
        pieces=pieces,
        fields=fields,
    )


def _texts(name: str) -> EvaluationTexts:
    is_source = "/" in name or "." in name
    return evaluation_texts(name) if is_source else harness_texts(tasks=(name,))


def _check(arguments: Mapping[str, Any]) -> None:
    if (remove := arguments["remove"]) not in ("document", "span"):
        raise InputError(f"decontaminate: remove={remove!r}: expected 'document' or 'span'")
    lowest = {"ngram": 1, "least": 1, "margin": 0, "shortest": 1, "pieces": 1}
    at_least("decontaminate", **{name: (arguments[name], low) for name, low in lowest.items()})


@step(
    output=Documents,
    version=2,
    name="decontaminate",
    cpus=0,
    check=_check,
    facts=source_license,
    environment=HUB,
)
def remove_contamination(
    run: StepContext,
    documents: DocumentSource,
    against: tuple[EvaluationTexts, ...],
    *,
    ngram: int,
    remove: str,
    least: int,
    margin: int,
    shortest: int,
    pieces: int,
    fields: Fields,
) -> Result:
    """The step of `decontaminate`."""
    from data.prepare.contamination import Cut, clean_shard, table_shard

    files, sets = _by_name(against)
    made = run.map(table_shard, {_TABLE: (files, ngram, least)})[_TABLE]
    table = storage.join(run.root, made.root)
    for name, count in made.result["sets"].items():
        unchecked = sets[name]["items"] - count["checked"]
        sets[name] = {**sets[name], **count, "unchecked": unchecked}
        if not count["ngrams"]:
            run.warn(f"{name}: no text has {least} words or more, so none of it was looked for")
    cut = Cut(margin, shortest, pieces) if remove == "span" else None
    items = document_items(documents, fields)
    work = {name: (item, table, tuple(files), cut) for name, item in items.items()}
    written = run.map(clean_shard, work)
    forget(run, _TABLE)
    about = {"ngram": ngram, "remove": remove, "sets": _joined(sets, written.values())}
    lines = [_line(name, found) for name, found in about["sets"].items()]
    if cut is not None:
        total = Counter[str]()
        for shard in written.values():
            total.update(shard.result["cut"])
        about["cut"] = total
        lines.append(
            f"cut {total['documents']:,} documents into {total['pieces']:,} pieces, without "
            f"{total['tokens']:,} tokens"
        )
    result = documents_result(run, written, documents, contamination=about)
    return {**result, "headline": [*result["headline"], *lines]}


def _by_name(against: Iterable[EvaluationTexts]) -> tuple[dict[str, str], dict[str, Any]]:
    """(URL of the texts, counts) by evaluation set."""
    files, sets = dict[str, str](), dict[str, Any]()
    for texts in against:
        for name, file in texts.files().items():
            if name in files:
                raise InputError(
                    f"decontaminate: two evaluation sets are named {name!r}; give one of them "
                    "another name with evaluation_texts(..., name=...)"
                )
            files[name], sets[name] = file, texts.result["sets"][name]
    return files, sets


def _joined(sets: Mapping[str, Any], written: Iterable[Shard]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {
        name: {**about, "documents": 0, "hits": 0, "examples": []} for name, about in sets.items()
    }
    for shard in written:
        for name, hits in shard.result["contamination"].items():
            own = found[name]
            own["documents"] += hits["documents"]
            own["hits"] += hits["hits"]
            own["examples"] = [*own["examples"], *hits["examples"]][:_EXAMPLES]
    return found


def _line(name: str, found: Mapping[str, Any]) -> str:
    short = f", {found['unchecked']:,} too short to look for" if found["unchecked"] else ""
    return (
        f"{name}: {found['hits']:,} n-grams in {found['documents']:,} documents "
        f"({found['items']:,} items{short})"
    )
