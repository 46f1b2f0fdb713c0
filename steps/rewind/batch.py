"""The batch of a step, read again by the reader that training uses, with the documents in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from data.read.retry import redact
from steps.rewind.parts import Part, part_of
from steps.rewind.run import Run
from steps.rewind.source import Origin
from training.config.batch_schedule import read_by

if TYPE_CHECKING:
    import numpy as np

    from data.batches.dataset import Dataset, DatasetSpec

_EXCERPT, _TOKENS = 160, 80  # characters of an excerpt, and tokens that are decoded for it


@dataclass(frozen=True, kw_only=True)
class InRow:
    """A document, or the part of it, in a row of a batch.

    `first` and `tokens` are the place in the row; `after` counts the document's tokens before it.
    """

    first: int
    tokens: int
    after: int
    origin: Origin
    text: str


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One row of a batch, of the cache whose directory is named `part`.

    `epoch` is how often its source had been read before. `loss` is in nats per counted token under
    the checkpoint; None without a checkpoint or tokens, and where it is not finite.
    """

    row: int
    part: str
    epoch: int
    documents: Sequence[InRow]
    loss: float | None = None
    counted: int | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of a step; `checkpoint` is the step of the one that its losses are of."""

    step: int
    length: int
    rows: Sequence[BatchRow]
    checkpoint: int | None = None

    @property
    def worst(self) -> int | None:
        """The row with the highest loss; None without losses."""
        known = {r.row: math.inf if r.loss is None else r.loss for r in self.rows if r.counted}
        return max(known, key=lambda row: known[row], default=None)

    @property
    def loss(self) -> float | None:
        """Mean nats per counted token; None if a row's is not finite."""
        rows = [row for row in self.rows if row.counted]
        if not rows or any(row.loss is None for row in rows):
            return None
        total = math.fsum((row.loss or 0.0) * (row.counted or 0) for row in rows)
        return total / sum(row.counted or 0 for row in rows)


class Rewinder:
    """Reads the batches of a run again. A context manager."""

    def __init__(self, run: Run) -> None:
        from data.batches.dataset import Dataset

        self.run = run
        self.spec: DatasetSpec = run.sequences.dataset()
        self.dataset: Dataset = Dataset(self.spec)
        parts = run.sequences.parts or [run.sequences]
        self.parts: list[Part] = [part_of(part.cache) for part in parts]

    def __enter__(self) -> Rewinder:
        return self

    def __exit__(self, *_: object) -> None:
        self.dataset.close()

    def stored_ids(self, step: int) -> np.ndarray:
        """The batch as it is fed to the devices: int32 [row, position] of all processes."""
        import numpy as np

        phase, positions = read_by(self.run.that_did(step).train, step)
        read = self.dataset.read(np.array(positions))
        return phase.cut(read, np.arange(phase.rows * phase.pieces))

    def batch(self, step: int, *, losses: bool = True) -> Batch:
        """The documents of a step's batch, in order, and by default the loss of each row."""
        ids = self.stored_ids(step)
        rows, checkpoint = self._rows(step, ids), None
        if losses and (found := self.run.checkpoint_before(step)) is not None:
            checkpoint = found[0]
            scored = zip(rows, self._losses(step, ids, found[1]), strict=True)
            rows = []
            for row, (nll, counted) in scored:
                loss = nll / counted if counted and math.isfinite(nll) else None
                rows.append(dataclasses.replace(row, loss=loss, counted=counted))
        return Batch(step=step, length=ids.shape[1], rows=rows, checkpoint=checkpoint)

    def _rows(self, step: int, ids: np.ndarray) -> list[BatchRow]:
        import numpy as np

        phase, positions = read_by(self.run.that_did(step).train, step)
        places = np.array(positions)
        sources, epochs = self.dataset.origins(places)
        stored = [self._held(row) for row in self.dataset.rows(places).tolist()]
        origins = self._origins([held for row in stored for held in row])
        found, length = [], ids.shape[1]
        for row, tokens in enumerate(ids):
            index, cut = divmod(row, phase.pieces)
            begin = cut * length
            documents = [
                self._in_row(each, origins, begin, tokens)
                for each in stored[index]
                if each.first < begin + length and begin < each.first + each.size
            ]
            part, epoch = self.spec.sources[sources[index]].name, int(epochs[index])
            found.append(BatchRow(row=row, part=part, epoch=epoch, documents=documents))
        return found

    def _held(self, row: int) -> list[_Held]:
        """The documents in a stored row, from the pieces of shards that it is joined from."""
        import numpy as np

        found, column = [], 0
        for source, shard, begin, size in self.dataset.pieces(row):
            held, end = self.parts[source].held(shard), begin + size
            first = int(np.searchsorted(held.begins, begin, side="right")) - 1
            last = int(np.searchsorted(held.begins, end))
            for index in range(max(first, 0), last):
                start = max(begin, int(held.begins[index]))
                stop = min(end, int(held.begins[index] + held.sizes[index]))
                if start < stop:
                    after = int(held.offsets[index]) + start - int(held.begins[index])
                    number, at = int(held.documents[index]), column + start - begin
                    found.append(_Held(source, shard, number, at, stop - start, after))
            column += size
        return found

    def _origins(self, held: list[_Held]) -> dict[tuple[int, int, int], Origin]:
        """Where documents came from, by source, shard and number; each shard is asked once."""
        wanted: dict[tuple[int, int], set[int]] = {}
        for each in held:
            wanted.setdefault((each.source, each.shard), set()).add(each.document)
        found = {}
        for (source, shard), numbers in wanted.items():
            known = [(source, shard, number) for number in sorted(numbers)]
            origins = self.parts[source].origins(shard, [number for *_, number in known])
            found |= dict(zip(known, origins, strict=True))
        return found

    def _in_row(self, held: _Held, origins: Any, begin: int, tokens: np.ndarray) -> InRow:
        first = max(held.first - begin, 0)
        stop = min(held.first + held.size - begin, len(tokens))
        origin = origins[held.source, held.shard, held.document]
        # Without what a URL may have of a login.
        shown = {"file": redact(origin.file), "place": redact(origin.place)}
        return InRow(
            first=first,
            tokens=stop - first,
            after=held.after + max(begin - held.first, 0),
            origin=dataclasses.replace(origin, **shown),
            text=self.excerpt(tokens[first:stop]),
        )

    def excerpt(self, ids: np.ndarray) -> str:
        """The beginning and the end of the text of stored ids; of integers the ids themselves."""
        if self.spec.masked:
            ids = ids % self.spec.vocab_size
        ids = ids[ids != self.spec.eos_id]
        parts = [ids] if len(ids) <= 2 * _TOKENS else [ids[:_TOKENS], ids[-_TOKENS:]]
        texts = [_printable(self._decode(part.tolist())) for part in parts]
        half = _EXCERPT // 2
        if len(texts) == 1 and len(texts[0]) <= _EXCERPT:
            return texts[0]
        return f"{texts[0][:half]} … {texts[-1][-half:]}"

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        cache = self.run.sequences.cache
        if cache.has_text:
            return cache.tokenizer().load().decode
        return lambda ids: " ".join(map(str, ids))

    def _losses(self, step: int, ids: np.ndarray, checkpoint: str) -> list[tuple[float, int]]:
        from training.evaluate.checkpoint_scorer import row_losses

        run, spec = self.run.that_did(step), self.spec
        phase, _ = read_by(run.train, step)
        flags = {"masked": spec.masked, "begins": spec.begins}
        flags["padded"] = self.run.sequences.padded
        given = run.model, phase.config(run.train), spec.eos_id
        nll, counted = row_losses(checkpoint, ids, *given, **flags)
        return list(zip(nll.tolist(), counted.tolist(), strict=True))


class _Held(NamedTuple):
    """Where a document of a source's shard is in a stored row; see `InRow`."""

    source: int
    shard: int
    document: int
    first: int
    size: int
    after: int


def _printable(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
