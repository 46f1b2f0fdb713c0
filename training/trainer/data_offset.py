"""The data offset of a checkpoint, checked so that no run resumes at another one by mistake.

A batch is a pure function of the data's order and the step, so a checkpoint needs no iterator
state: it stores a digest of the order and the number of sequences read, and a resume compares both.
"""

from __future__ import annotations

from typing import Any

from data.batches.dataset import DatasetSpec
from pipeline.errors import InputError
from pipeline.identity.fingerprint import digest
from training.config import TrainConfig
from training.config.batch_schedule import rows_read


def data_offset(data: DatasetSpec, train: TrainConfig, step: int) -> dict[str, Any]:
    """The data offset after `step`, as JSON values: sequences read, their length, and the order."""
    rows = rows_read(train, step)
    return {"rows": rows, "sequence_length": data.sequence_length, "order": _order(data)}


def _order(data: DatasetSpec) -> str:
    """Digest of everything that decides the tokens of sequence n; file locations are left out."""
    sources = [
        {
            "shards": [[shard.tokens, shard.check] for shard in source.shards],
            "io_block_size": source.io_block_size,
            "window_blocks": source.window_blocks,
            "seed": source.seed,
        }
        for source in data.sources
    ]
    phases = [[phase.start, [float(w).hex() for w in phase.weights]] for phase in data.phases]
    return digest([sources, phases, data.sequence_length, data.tokenizer, data.seed])


def check_data_offset(stored: dict[str, Any], wanted: dict[str, Any], path: str) -> None:
    """Refuse, with `InputError`, to resume from a checkpoint of other data or at another offset."""
    names = {"sequence_length": "sequences of {} tokens", "order": "data order {:.12}"}
    names["rows"] = "{} sequences read"
    for name, words in names.items():
        if stored[name] != wanted[name]:
            raise InputError(
                f"{path} was saved with {words.format(stored[name])}, this run would continue with "
                f"{words.format(wanted[name])}: give it the data, batch size and schedules it had, "
                "or begin a new run from its parameters"
            )
