"""Read rows of integers that are not text from Parquet, as a token cache of whole sequences.

    tokens    = integer_rows("gs://bucket/rows/*.parquet", vocab_size=7168, sequence_length=8192,
                             splits=(("validation", 4096),))
    sequences = block_shuffle(tokens, 8192)

Every row is one sequence. There are no documents, no tokenizer and no bits per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from data.read.listing import absolute, list_source
from models.shape.validation import at_least
from pipeline import External, InputError, Result, StepContext, step
from pipeline.store.shards import Shard
from steps.artifacts import TRAIN, TokenCache
from steps.gang import HUB
from steps.tokens.token_cache import entropy, write_rows, write_vocabulary

if TYPE_CHECKING:
    from data.read.integer_rows import RowFormat, RowSpan

_NO_EOS = -1  # no id ends a document
_COUNTED = ("tokens", "rows", "predicted")


def _check(arguments: Mapping[str, Any]) -> None:
    names, size = ("vocab_size", "sequence_length"), arguments["vocab_size"]
    at_least("integer_rows", **{name: (arguments[name], 2) for name in names})
    padding = arguments["padding"]
    if padding is not None and not 0 <= padding < size:
        raise InputError(f"integer_rows: expected padding below vocab_size={size}, got {padding}")
    given = [name for name, _ in arguments["splits"]]
    if not given or TRAIN in given or len(set(given)) != len(given):
        raise InputError(
            f"integer_rows: expected splits of different names other than {TRAIN!r}, at least one, "
            f"got {given}"
        )
    at_least("integer_rows splits", **{name: (rows, 1) for name, rows in arguments["splits"]})


@step(output=TokenCache, version=1, cpus=0, check=_check, environment=HUB)
def integer_rows(
    run: StepContext,
    source: Annotated[str, External(list_source, absolute)],
    *,
    vocab_size: int,
    sequence_length: int,
    splits: tuple[tuple[str, int], ...],
    column: str = "input_ids",
    mask_column: str | None = None,
    padding: int | None = None,
    seed: int = 0,
) -> Result:
    """Rows of a list column as sequences of `sequence_length` tokens; shorter rows are padded.

    Args:
        source: Parquet files (see `data/source.py`).
        vocab_size: number of ids; all ids are below it.
        sequence_length: most ids of a row; the padding of a shorter row is never predicted.
        splits: (name, rows) of the held-out splits: row groups drawn by `seed`, the last cut.
        column: the column with lists of integers.
        mask_column: a column with lists of the same lengths, 0 where a token is input only and
            not predicted (prompts, conditions).
        padding: an id of the rows that is never predicted.
        seed: another seed holds out other row groups.

    Raises:
        InputError: the source cannot be read, or a row is too long or has a null or an id that is
            out of range.
    """
    from data.read.integer_rows import RowFormat

    layout = RowFormat(
        column=column,
        mask_column=mask_column,
        length=sequence_length,
        vocab_size=vocab_size,
        padding=padding,
    )
    divided = divided_rows(source, layout, splits, seed)
    write_vocabulary(run, [0] * vocab_size)
    items = {
        f"{split}/{number:06d}": (span, layout)
        for split, parts in divided.items()
        for number, span in enumerate(parts)
    }
    written = run.map(rows_shard, items)
    return {
        "vocab_size": vocab_size,
        "sequence_length": sequence_length,
        "masked": True,
        "eos_id": _NO_EOS,
        "tokenizer": "",
        "splits": {
            split: _summary(run, split, [written[f"{split}/{n:06d}"] for n in range(len(parts))])
            for split, parts in divided.items()
        },
    }


def divided_rows(
    source: str, layout: RowFormat, splits: Sequence[tuple[str, int]], seed: int
) -> dict[str, list[RowSpan]]:
    """The spans of each split, one a shard; `InputError` for a source without rows."""
    import numpy as np

    from data.batches.feistel import FeistelPermutation, derive_key
    from data.read.integer_rows import divide, list_spans

    spans = list_spans(source, layout)
    if not spans:
        raise InputError(f"{source}: expected rows, found Parquet files without any")
    shuffle = FeistelPermutation(len(spans), derive_key("integer_rows", seed))
    return divide(spans, shuffle(np.arange(len(spans))).tolist(), splits)


def rows_shard(directory: str, item: tuple[RowSpan, RowFormat]) -> Mapping[str, Any]:
    """Shard writer: the cache of some rows, and how often each id is predicted."""
    from data.read.integer_rows import read_rows

    return write_rows(directory, read_rows(*item), item[1].vocab_size, bands=2)


def _summary(run: StepContext, split: str, parts: Sequence[Shard]) -> dict[str, Any]:
    total = {name: sum(part.result[name] for part in parts) for name in _COUNTED}
    if not total["predicted"]:
        raise InputError(
            f"integer_rows: no id of the {total['rows']:,} rows of split {split!r} is predicted; "
            "check mask_column and padding (the first id of a row is never predicted)"
        )
    return {**total, "unigram_entropy": entropy(run, parts)}
