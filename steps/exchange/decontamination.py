"""What the cards of a model say about evaluation sets in its training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.graph.artifact import argument_of
from pipeline.identity.listing import Summary
from pipeline.plan.lineage import Ancestor
from pipeline.store.manifest import ADOPTED, resolve_ref

_DOCUMENTS = ("documents", "source")  # inputs of steps that are the documents themselves
# Inputs and sources of steps that are no training data: what counts, searches or scores it.
_NOT_DATA = ("tokenizer", "against", "by", "template")
_HOW = {
    "document": "Documents with an n-gram of {ngram} words of these sets were dropped.",
    "span": "N-grams of {ngram} words of these sets were removed, with the text around them.",
}


def decontaminated(ancestors: Sequence[Ancestor]) -> str:
    """The names of the sets for which all training documents were searched; "" for none."""
    sets = {a.path: a.manifest.result["contamination"]["sets"] for a in _searches(ancestors)}
    everywhere = [
        set[str]().union(*(sets.get(path, ()) for path in _origins(cache, ancestors)))
        for cache in _caches(ancestors)
    ]
    return ", ".join(sorted(set.intersection(*everywhere))) if everywhere else ""


def decontamination(ancestors: Sequence[Ancestor]) -> list[str]:
    """The section of DATA.md."""
    lines = ["## Decontamination", ""]
    searches = _searches(ancestors)
    # An output that refers to another one's files says the same as that one.
    again = {s.manifest.home(s.path) for s in searches if s.manifest.alias is not None}
    for search in (each for each in searches if each.path not in again):
        about = search.manifest.result["contamination"]
        lines += [
            f"{search.manifest.label}: {_HOW[about['remove']].format(**about)}",
            "",
            "| evaluation set | items | too short to look for | documents found | n-grams found |",
            "|---|---|---|---|---|",
        ]
        for name, found in about["sets"].items():
            counts = (found[field] for field in ("items", "unchecked", "documents", "hits"))
            lines.append(f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |")
        lines.append("")
    found = {search.path for search in searches}
    others = [
        cache.manifest.label
        for cache in _caches(ancestors)
        if not found & set(_origins(cache, ancestors))
    ]
    if others or not searches:
        lines += [f"Not searched for evaluation sets: {', '.join(others) or 'the data'}.", ""]
    return lines


def data_sources(path: str, ancestors: Sequence[Ancestor]) -> list[Summary]:
    """The sources that the training data of the model in `path` was read from.

    Not those of evaluation sets, tokenizers, classifiers or chat templates.
    """
    known: Mapping[str, Ancestor] = {each.path: each for each in ancestors}
    ahead, met, found = [path], set[str](), list[Summary]()
    while ahead:
        path = ahead.pop()
        if path in met or path not in known:
            continue
        met.add(path)
        manifest = known[path].manifest
        alias = manifest.alias
        if alias is not None and alias.kind == ADOPTED:  # its own inputs were not read for it
            ahead.append(manifest.home(path))
            continue
        inputs = manifest.inputs
        if alias is not None and alias.input in inputs:
            inputs = {alias.input: inputs[alias.input]}
        names = [name for name in inputs if argument_of(name) not in _NOT_DATA]
        ahead += [resolve_ref(path, inputs[name]["directory"]) for name in names]
        found += [each for name, each in manifest.sources.items() if name not in _NOT_DATA]
    return found


def _searches(ancestors: Sequence[Ancestor]) -> list[Ancestor]:
    return [each for each in ancestors if "contamination" in each.manifest.result]


def _caches(ancestors: Sequence[Ancestor]) -> list[Ancestor]:
    """The token caches that the model was trained on, of text or of other rows."""
    made = ("tokenize", "integer_rows", "conversations")
    return [each for each in ancestors if each.manifest.step in made]


def _origins(cache: Ancestor, ancestors: Sequence[Ancestor]) -> Iterator[str]:
    """URLs of the outputs that the documents of a token cache passed through."""
    known: Mapping[str, Ancestor] = {each.path: each for each in ancestors}
    ahead = [cache.path]
    while ahead:
        path = ahead.pop()
        yield path
        if (found := known.get(path)) is None:
            continue
        inputs = found.manifest.inputs
        names = [inputs[name]["directory"] for name in _DOCUMENTS if name in inputs]
        if found.manifest.alias is not None:
            names.append(found.manifest.alias.directory)
        ahead += [resolve_ref(path, name) for name in names]
