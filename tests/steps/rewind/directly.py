"""The tokens of a document and the loss of a row, by other ways than those of `rewind`."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq

VOCAB, EOS = 257, 256


def expected_ids(origin, rewinder) -> list[int] | None:
    """The tokens of a document, from its source's file by another reader; None of a chat."""
    if origin.file.endswith("rows.parquet"):
        return pq.read_table(origin.file)["input_ids"][origin.row].as_py()
    if origin.file.endswith(".parquet"):
        return [*pq.read_table(origin.file)["text"][origin.row].as_py().encode(), EOS]
    with open(origin.file) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if "messages" in rows[origin.row]:
        return None
    own, text = rows[origin.row]["id"], rows[origin.row]["text"]
    assert origin.id.partition("/")[0] == own
    return [*(text.upper() if origin.id.endswith("/0") else text).encode(), EOS]


def direct(model, row: np.ndarray, kind: str) -> tuple[float, int]:
    """Summed nll and counted tokens of stored ids, from the logits of each document alone."""
    predicted = np.ones(len(row), bool)
    if kind in ("chats", "integers"):
        predicted = row < VOCAB
    tokens, starts = row % VOCAB, [0]
    if kind == "packed":
        starts += [i for i in range(1, len(row)) if row[i] == EOS]
        predicted[1:] &= ~((tokens[:-1] == EOS) & (tokens[1:] == EOS))
    if kind == "chats":
        starts += [i for i in range(1, len(row)) if row[i] >= 2 * VOCAB]
    nll, counted = 0.0, 0
    for begin, end in zip(starts, [*starts[1:], len(row)], strict=True):
        logits = np.asarray(model(tokens[begin:end]), np.float64)
        norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        # The last token of a document predicts the next one's first: EOS, where that counts.
        for at in range(begin, min(end, len(row) - 1)):
            if predicted[at + 1]:
                nll += norm[at - begin] - logits[at - begin, tokens[at + 1]]
                counted += 1
    return nll, counted
