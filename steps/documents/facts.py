"""What `plan` finds out about a source: its licence, and whether its documents can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.read.formats import compression
from data.read.unit import SCORE, Fields, Unit
from data.select.token_budget import Budget
from data.sources import license_of
from pipeline import InputError
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node
from pipeline.store import storage

_FILES = 16  # files that are opened, spread over the source


def source_license(node: Node, results: Results) -> Facts:
    """The licence of what a step reads as `source` or `documents`, where it is known."""
    del results
    return _license_facts(node.config.get("source", node.config.get("documents")))


def _license_facts(source: Any) -> Facts:
    found = license_of(source) if isinstance(source, str) else None
    if found is None:
        return Facts()
    repository, license = found
    about = {"source": repository, "name": license.name, "commercial": license.commercial}
    return Facts((f"licence of {repository}: {license}",), {"license": about})


def first_documents(node: Node, results: Results) -> Facts:
    """The licence of a step's source; refuses a local one whose first documents are wrong."""
    del results
    config, source = node.config, node.config.get("source")
    if source is not None and storage.is_local(source):
        from data.read.work_units import file_units, list_files, read_unit

        names = ("text", "id", "score", "skip_nulls", "skip_invalid", "columns")
        fields = Fields(**{name: config[name] for name in names})
        score = [SCORE] if config["min_score"] is not None else []
        files = list_files(source)
        opened, units = files[:: -(-len(files) // _FILES)], list[Unit]()
        for url, _ in opened:
            units += (found := file_units(url, fields))
            for unit in found[:1]:
                next(read_unit(unit, ["id", "text", "token_count", *score, *fields.columns]), None)
        if len(opened) == len(files):
            _check_budget(source, config, units)
    return _license_facts(source)


def _check_budget(source: str, config: Mapping[str, Any], units: list[Unit]) -> None:
    """Refuse a budget of more tokens than the units have bytes of text and documents.

    Of plain files of lines or text only: in others a text may take fewer bytes than it has, as in
    a dictionary, which has a repeated one once.
    """
    if any(unit.kind not in ("lines", "text") or compression(unit.file) for unit in units):
        return
    budget = Budget(train=config["tokens"], splits=config["splits"])
    asked = {name: max(0, budget.asked(name)) for name in budget.names}
    # A line of JSON has more bytes besides its text than the one token that ends a document.
    most = sum(unit.text_bytes + max(1, unit.rows) for unit in units)
    if sum(asked.values()) <= most:
        return
    from data.select.hash_ranges import too_much

    name = next(iter(asked))
    others = sum(asked.values()) - asked[name]
    why = too_much(name, budget, asked[name], max(0, most - others), most)
    raise InputError(f"{source}: {why}")
