"""Chats as a token cache of whole rows, with a loss on what the assistant writes.

    tokens  = conversations("chats/*.jsonl", tokenizer, template="chatml", sequence_length=2048)
    trained = warm_start(model, block_shuffle(tokens, 2048), take="model", ...)

A task reads some spans of files and writes the rows of one split; a conversation's split is given
by a hash of its messages, so equal conversations are in the same one.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from data.chat.messages import Columns, Exchange, Messages
from data.read.listing import absolute, list_documents
from models.shape.validation import at_least
from pipeline import External, InputError, Result, StepContext, step
from pipeline.store.shards import Shard
from steps.artifacts import TRAIN, TokenCache, Tokenizer
from steps.gang import HUB
from steps.tokens.chat_templates import FILE, list_template, place_template, read_template
from steps.tokens.token_cache import entropy, write_rows, write_vocabulary

if TYPE_CHECKING:
    from data.chat.encoder import ChatEncoder, Encoded
    from data.read.records import RecordSpan

__all__ = ["Exchange", "Messages", "conversations"]
_AT_ONCE = 256  # conversations that are encoded together
_MOST_SPANS = 64  # of one task of a held-out split, which keeps few conversations of each
_LARGEST = 1 << 64
_COUNTED = (
    *("tokens", "rows", "predicted", "conversations", "tokens_kept", "cut", "truncated"),
    *("unpredicted", "invalid"),
)


@dataclass(frozen=True, kw_only=True)
class ConversationGroup:
    """What one task reads and writes."""

    spans: tuple[RecordSpan, ...]
    hashes: tuple[int, int]  # the range of its split's conversations
    columns: Columns
    template: str
    tokenizer: str  # URL of the tokenizer.json
    digest: str  # its SHA-256
    length: int
    seed: int
    skip_invalid: bool


def _check(arguments: Mapping[str, Any]) -> None:
    at_least("conversations", sequence_length=(arguments["sequence_length"], 2))
    splits = arguments["splits"]
    names, shares = [name for name, _ in splits], [share for _, share in splits]
    if TRAIN in names or len(set(names)) != len(names):
        raise InputError(
            f"conversations: expected splits of different names other than {TRAIN!r}, got {names}"
        )
    if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
        raise InputError(
            "conversations: expected shares of the conversations above 0, together below 1, got "
            f"{dict(splits)}"
        )


@step(output=TokenCache, version=1, cpus=0, check=_check, environment=HUB)
def conversations(
    run: StepContext,
    source: Annotated[str, External(list_documents, absolute)],
    tokenizer: Tokenizer,
    *,
    template: Annotated[str, External(list_template, place_template)],
    sequence_length: int,
    splits: tuple[tuple[str, float], ...] = (("validation", 0.01),),
    columns: Columns = Messages(),
    skip_invalid: bool = False,
    seed: int = 0,
) -> Result:
    """Conversations in rows of `sequence_length` tokens, with a loss on the assistant's turns.

    The ids are those of `apply_chat_template` of `transformers`. What an assistant writes is
    predicted, with the token that ends its turn; the rest is read. Conversations share rows (best
    fit, the rest is padding) and do not see each other: train with `separate_documents=True`. A
    conversation that is longer than a row is cut behind the last whole turn of the assistant in it,
    or without one truncated. Special tokens that a message spells out are encoded as text.

    Args:
        source: JSON lines or Parquet (see `data/source.py`).
        tokenizer: the tokenizer of the model, with the special tokens that the template names.
        template: "alpaca" or "zephyr" (EOS is the only special token), "chatml" or "llama3"; or a
            file or URL: a Jinja template, a tokenizer_config.json, or a folder with one of them.
        sequence_length: tokens of a row.
        splits: (name, share of the conversations) of the held-out splits.
        columns: `Messages(column)`, or `Exchange(instruction, response, input, system)`.
        skip_invalid: leave out and count rows that are no conversation.
        seed: another seed holds out other conversations.

    Raises:
        InputError: the source or the template cannot be read, the tokenizer does not have the
            template's tokens, the template gives no loss, or a row is no conversation.
    """
    from data.chat.encoder import ChatEncoder

    loaded, text = tokenizer.load(), read_template(template)
    encoder = ChatEncoder(loaded, text)
    items = items_of(
        source,
        splits,
        columns=columns,
        template=text,
        tokenizer=tokenizer.file,
        digest=loaded.digest,
        length=sequence_length,
        seed=seed,
        skip_invalid=skip_invalid,
    )
    write_vocabulary(run, loaded.token_bytes.tolist(), **{FILE: text})
    written = list(run.map(conversations_shard, items).values())
    names = (TRAIN, *(name for name, _ in splits))
    found = {split: _summary(run, split, written) for split in names}
    train, end = found[TRAIN], encoder.end_id
    share = train["predicted"] / train["tokens"]
    line = (
        f"{train['conversations']:,} conversations in {train['rows']:,} rows, {share:.0%} of the "
        f"tokens predicted, {train['padding_share']:.1%} padding; a turn ends with "
        f"{loaded.decode([end])!r}"
    )
    return {
        "vocab_size": loaded.vocab_size,
        "sequence_length": sequence_length,
        **{"masked": True, "begins": True},
        "eos_id": loaded.eos_id,
        "end_of_turn": end,
        "tokenizer": loaded.digest,
        "splits": found,
        "headline": [line],
    }


def items_of(
    source: str, splits: Sequence[tuple[str, float]], *, columns: Columns, **about: Any
) -> dict[str, ConversationGroup]:
    """What each task reads, by the name of the shard that it writes."""
    from data.read.records import record_spans

    spans = record_spans(source, columns.names)
    return {
        name: ConversationGroup(spans=group, hashes=hashes, columns=columns, **about)
        for name, group, hashes in _tasks(spans, splits)
    }


def _tasks(
    spans: Sequence[RecordSpan], splits: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, tuple[RecordSpan, ...], tuple[int, int]]]:
    """Name, spans and range of hashes of each task; held-out splits have the largest hashes."""
    end = _LARGEST
    ranges = []
    for split, share in splits:
        begin = end - int(share * _LARGEST)
        ranges.append((split, min(_MOST_SPANS, int(1 / share)), (begin, end)))
        end = begin
    for split, together, hashes in ((TRAIN, 1, (0, end)), *ranges):
        for number, first in enumerate(range(0, len(spans), together)):
            yield f"{split}/{number:06d}", tuple(spans[first : first + together]), hashes


def conversations_shard(directory: str, item: ConversationGroup) -> Mapping[str, Any]:
    """Shard writer: the rows of a split's conversations in some spans."""
    from data.chat.rows import pack_rows

    counts: Counter[str] = Counter()
    kept = [each for _, each in conversations_of(item, counts)]
    _, size = _encoder(item.tokenizer, item.digest, item.template)
    rows = pack_rows(kept, item.length, size)
    return {
        **{name: counts[name] for name in ("cut", "truncated", "unpredicted", "invalid")},
        "conversations": len(kept),
        "tokens_kept": sum(len(each.ids) for each in kept),
        **write_rows(directory, [rows], size, bands=3, digest=item.digest),
    }


def conversations_of(
    item: ConversationGroup, counts: Counter[str]
) -> Iterator[tuple[tuple[int, int], Encoded]]:
    """(number of the span, of the record in it) of each conversation in the rows, and its tokens.

    In the order of the source; counts all of them by what became of them.
    """
    from data.chat.rows import UNPREDICTED, shortened

    for place, encoded in _encoded(item, counts):
        short, what = shortened(encoded, item.length)
        counts[what] += 1
        if what != UNPREDICTED:
            yield place, short


@functools.lru_cache(maxsize=1)
def _encoder(url: str, digest: str, template: str) -> tuple[ChatEncoder, int]:
    from data.chat.encoder import ChatEncoder
    from data.tokenizer.text_tokenizer import TextTokenizer

    loaded = TextTokenizer.load_once(url, digest, parallel=False)
    return ChatEncoder(loaded, template), loaded.vocab_size


def _encoded(
    item: ConversationGroup, counts: Counter[str]
) -> Iterator[tuple[tuple[int, int], Encoded]]:
    """The conversations of the task's split, in the order of the source; counts the invalid."""
    from data.read.records import read_records
    from data.select.document_hash import document_hash

    encoder, _ = _encoder(item.tokenizer, item.digest, item.template)
    begin, end = item.hashes
    places, rendered = list[tuple[int, int]](), list[str]()
    for at, span in enumerate(item.spans):
        for number, record in enumerate(read_records(span, item.columns.names)):
            try:
                if record.wrong:
                    raise ValueError(record.wrong)
                messages = item.columns.read(record.row)
                (hashed,) = document_hash([json.dumps(messages)], item.seed).tolist()
                if begin <= hashed < end:
                    rendered.append(encoder.template.render(messages))
                    places.append((at, number))
            except ValueError as error:
                # Every span is read for the training split once, which counts them.
                counts["invalid"] += begin == 0
                if not item.skip_invalid:
                    raise InputError(
                        f"{record.place}: {error}; repair the row, or leave such rows out with "
                        "skip_invalid=True"
                    ) from error
            if len(rendered) == _AT_ONCE:
                yield from zip(places, encoder.encode_rendered(rendered), strict=True)
                places, rendered = [], []
    yield from zip(places, encoder.encode_rendered(rendered), strict=True)


def _summary(run: StepContext, split: str, written: Sequence[Shard]) -> dict[str, Any]:
    parts = [shard for shard in written if shard.name.startswith(f"{split}/")]
    total = {name: sum(part.result[name] for part in parts) for name in _COUNTED}
    if not total["predicted"]:
        if split != TRAIN:
            run.warn(f"no conversation fell into the split {split!r}; give it a larger share")
            return total
        raise InputError(
            "conversations: nothing of the training split is predicted: "
            f"{total['invalid']:,} rows are no conversation, and {total['unpredicted']:,} have no "
            "assistant's words in a row; give other columns, or a longer sequence_length"
        )
    return {
        **total,
        "padding_share": 1 - total["tokens_kept"] / total["tokens"],
        "unigram_entropy": entropy(run, parts),
    }
