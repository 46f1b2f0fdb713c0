"""Reads the first documents of a local source before anything runs, for `plan` and `run`."""

from __future__ import annotations

from data.read.unit import Fields
from pipeline.graph.facts import Facts, Results
from pipeline.graph.node import Node
from pipeline.store import storage


def first_documents(node: Node, results: Results) -> Facts:
    """No facts about a step that samples.

    Raises:
        InputError: the first documents of its local source cannot be read as it declares, such as
            for want of a column.
        StorageError: the disk failed.
    """
    del results
    source, config = node.config["source"], node.config
    if storage.is_local(source):
        from data.read.work_units import file_units, list_files, read_unit

        fields = Fields(config["text"], config["id"], config["score"], config["skip_nulls"])
        score = ["score"] if config["min_score"] is not None else []
        for url, _ in list_files(source)[:1]:
            for unit in file_units(url, fields)[:1]:
                next(read_unit(unit, ["id", "text", "token_count", *score]), None)
    return Facts()
