"""Faults of tokenizers and of texts, and many large shards in one process.

Each suite takes a seed, how often to try, and an empty directory; it returns figures, and raises
`AssertionError` naming the seed of the trial that went wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from data.cache.token_shard import write_shard
from data.read import parquet_table, python_docs
from data.read.parquet_table import TableWriter
from data.tokenizer import text_tokenizer
from data.tokenizer.backends import to_compare
from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import CorruptOutput, InputError, PonenteError
from pipeline.identity import fingerprint
from steps.tokens.token_cache import DocumentGroup, tokenize_shard
from tests.faults.registry import Fault, pick, trials

PEAK_BYTES = 1536 << 20
SHARDS, DOCUMENTS = 10, 100_000
SLOPE_BYTES = 8 << 20  # a shard
_SCRIPTS = (
    "abc XYZ 019 .,;:!?'\"-",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",  # Hebrew, right to left
    "\u0645\u0631\u062d\u0628\u0627",  # Arabic
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",  # Chinese
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308\U0001f44d\U0001f3fd",
    "e\u0301A\u030a\ufb01\u00e9",  # composed and decomposed
    "\u200d\u200e\u200f\u202e\ufeff",
    "\0\x1c\x85\u2028\r\n\t",
    "\u0915\u094d\u0937\u093f\u0e01\u0e47\ud55c",
    "\U0010ffff\ue000\u180e",
)


@functools.cache
def _content() -> bytes:
    return text_tokenizer.train([python_docs.documents()["text"].to_pylist()[:60]], 600)


@functools.cache
def _tokenizer() -> TextTokenizer:
    return TextTokenizer(_content())


# 19: texts


def texts(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Texts of many scripts, with surrogates, EOS or a million characters, come back the same."""
    del workspace
    kinds: dict[str, int] = {}

    def trial(number: int) -> None:
        draw = random.Random(number)
        kind = ("scripts", "characters", "eos", "long", "surrogate")[_kind(number)]
        kinds[kind] = kinds.get(kind, 0) + 1
        text = _text(draw, kind)
        if kind == "surrogate":
            _refused(lambda: _tokenizer().encode_batch(["fine", text]), InputError, "surrogate")
            return
        _comes_back(text)

    return {"trials": trials(seed, count, trial), "kinds_tried": kinds}


def _kind(number: int) -> int:
    # A million characters take a second: one trial in fifty.
    return 3 if number % 50 == 49 else (0, 1, 2, 4)[pick(number, 4)]


def _text(draw: random.Random, kind: str) -> str:
    if kind == "characters":
        points = (draw.randrange(0x110000) for _ in range(draw.randint(0, 60)))
        return "".join(chr(c) for c in points if not 0xD800 <= c < 0xE000)
    part = "".join(
        "".join(draw.sample(script, min(len(script), 5))) + " " * draw.randint(0, 3)
        for script in draw.choices(_SCRIPTS, k=draw.randint(0, 8))
    )
    if kind == "eos":
        return f"{part}{EOS}{part[:3]}{EOS[:5]}"
    if kind == "long":
        return (part + draw.choice(("", " ", "\n")) + draw.choice(("a", "\u5b57", " b"))) * (
            1_000_000 // (len(part) + 1) + 1
        )
    if kind == "surrogate":
        place = draw.randint(0, len(part))
        return part[:place] + chr(draw.randrange(0xD800, 0xE000)) + part[place:]
    return part


def _comes_back(text: str) -> None:
    """Round trip, no EOS, bytes that add up, and the same ids from the checked back end."""
    trained = _tokenizer()
    ids, lengths = trained.encode_batch([text])
    assert trained.decode(ids) == text, f"{text[:80]!a} came back another"
    assert trained.eos_id not in ids, f"{text[:80]!a} forged EOS"
    assert trained.token_bytes[ids].sum() == len(text.encode())
    documents = [pa.array(["before", text])]
    encoder = trained.checked()
    for texts in documents:
        encoder.check(to_compare(texts))
    found = list(trained.encode_documents(documents, encoder))
    assert encoder.difference is None, encoder.difference
    found_lengths = np.concatenate([part for _, part in found])
    assert found_lengths[1:].tolist() == lengths.tolist(), f"{text[:80]!a}"
    assert np.array_equal(np.concatenate([part for part, _ in found])[found_lengths[0] :], ids)


# 19: tokenizers


def _edit(change: Callable[[dict[str, Any]], None]) -> bytes:
    description = json.loads(_content())
    change(description)
    return json.dumps(description).encode()


def _missing_eos(directory: Path) -> None:
    content = _edit(lambda d: d.update(added_tokens=[]))
    _refused(lambda: TextTokenizer(content), InputError, "special token")


def _plain_eos(directory: Path) -> None:
    content = _edit(lambda d: d["added_tokens"][0].update(special=False))
    _refused(lambda: TextTokenizer(content), InputError, "special token")


def _not_bytes(directory: Path) -> None:
    content = _edit(lambda d: d.update(decoder=None))
    _refused(lambda: TextTokenizer(content), InputError, "ByteLevel")


def _dropout(directory: Path) -> None:
    content = _edit(lambda d: d["model"].update(dropout=0.5))
    _refused(lambda: TextTokenizer(content), InputError, "dropout")


def _cut_file(directory: Path) -> None:
    _refused(lambda: TextTokenizer(_content()[:-100]), InputError, "tokenizer.json")


def _changed_file(directory: Path) -> None:
    """Another file under the same name is another input, and does not pass for the first."""
    file = directory / "tokenizer.json"
    file.write_bytes(_content())
    before = TextTokenizer.load(str(file)).digest
    file.write_bytes(_edit(lambda d: d["model"]["merges"].pop()))
    after = TextTokenizer.load(str(file)).digest
    assert fingerprint.digest(before) != fingerprint.digest(after)
    other = hashlib.sha256(b"not read by this process").hexdigest()
    _refused(lambda: TextTokenizer.load_once(str(file), other), CorruptOutput, after)


def _wrong_vocabulary(directory: Path) -> None:
    """A size that the ids do not fit: nothing is written that could be read."""
    trained = _tokenizer()
    ids = np.array([trained.vocab_size - 1], np.uint32)
    url = str(directory / "shard")
    documents = [(ids, np.array([1]))]
    _refused(
        lambda: write_shard(url, documents, vocab_size=trained.vocab_size - 1, eos_id=0),
        InputError,
        f"found id {trained.vocab_size - 1}",
    )
    assert not (directory / "shard").exists() or not any((directory / "shard").iterdir())


def _eos_inside(directory: Path) -> None:
    documents = [(np.array([5, 0, 6], np.uint32), np.array([3]))]
    url = str(directory / "shard")
    _refused(lambda: write_shard(url, documents, vocab_size=600, eos_id=0), InputError, "EOS")


def _empty_output(directory: Path) -> None:
    """Documents without text are EOS alone; no documents are a shard of none."""
    for documents in ([], ["", "", ""]):
        item = _row_group(directory, [documents], f"{len(documents)}")
        if not documents:
            assert item is None
            continue
        assert item is not None
        result = tokenize_shard(str(directory / f"out{len(documents)}"), item)
        assert (result["tokens"], result["documents"]) == (3, 3), result


TOKENIZERS = (
    *(_missing_eos, _plain_eos, _not_bytes, _dropout, _cut_file, _changed_file),
    *(_wrong_vocabulary, _eos_inside, _empty_output),
)


def tokenizers(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Tokenizers that cannot be used, or are not the ones meant, give a typed error."""

    def trial(number: int) -> None:
        directory = workspace / f"{number}"
        directory.mkdir()
        TOKENIZERS[pick(number, len(TOKENIZERS))](directory)

    return {"trials": trials(seed, count, trial), "kinds_tried": min(count, len(TOKENIZERS))}


def _refused(action: Callable[[], Any], kind: type[PonenteError], words: str) -> None:
    try:
        action()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"expected {kind.__name__} that says {words!r}, found no error")
    assert words in said, f"{said} does not say {words!r}"


# 43: many large shards


def large_shards(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """Shards of `DOCUMENTS` documents one after the other in a process: bounded memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:  # a process of its own, for a peak of its own
        peaks = pool.apply(_write_shards, (seed, count, DOCUMENTS, str(workspace)))
    half = len(peaks) // 2
    slope = float(np.polyfit(range(half, len(peaks)), peaks[half:], 1)[0]) if half > 1 else 0.0
    assert max(peaks) <= PEAK_BYTES, f"seed {seed}: peak {max(peaks) >> 20} MiB"
    assert slope <= SLOPE_BYTES, f"seed {seed}: {slope / 2**20:.1f} MiB more with each shard"
    return {
        "trials": count,
        "documents_each": DOCUMENTS,
        "peak_mib": max(peaks) >> 20,
        "first_mib": peaks[0] >> 20,
        "slope_mib_per_shard": round(slope / 2**20, 2),
    }


def _write_shards(seed: int, count: int, documents: int, workspace: str) -> list[int]:
    """Peak memory of this process in bytes after each shard."""
    peaks = []
    words = " ".join(python_docs.documents()["text"].to_pylist()).split()
    for number in range(count):
        draw = np.random.default_rng(seed + number)
        directory = Path(workspace) / f"{number}"
        directory.mkdir(parents=True)

        def batches(draw: np.random.Generator = draw) -> Any:
            for begin in range(0, documents, 1000):
                places = draw.integers(0, len(words) - 400, min(1000, documents - begin))
                yield [" ".join(words[p : p + 40 + p % 80]) for p in places.tolist()]

        # One row group, so one shard, whatever our own files would hold.
        with mock.patch.object(parquet_table, "_ROW_GROUP_BYTES", 1 << 40):
            item = _row_group(directory, batches(), "large")
        assert item is not None
        result = tokenize_shard(str(directory / "out"), item)
        assert result["documents"] == documents, result
        peaks.append(_peak())
    return peaks


def _peak() -> int:
    """Most memory this process has had, in bytes; getrusage would count its parent's as its own."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)


def _row_group(directory: Path, batches: Any, name: str) -> DocumentGroup | None:
    """A Parquet file with these texts in its first row group; None when there are none."""
    schema = pa.schema([("text", pa.string())])
    file = directory / f"{name}.parquet"
    rows = 0
    with TableWriter(str(file), schema) as writer:
        for texts in batches:
            if texts:
                writer.write(pa.RecordBatch.from_pydict({"text": texts}, schema=schema))
                rows += len(texts)
    (directory / "tokenizer.json").write_bytes(_content())
    return (
        DocumentGroup(
            file=str(file),
            row_group=0,
            tokenizer=str(directory / "tokenizer.json"),
            digest=_tokenizer().digest,
            backend="auto",
        )
        if rows
        else None
    )


FAULTS = {
    19: [
        Fault("texts of every kind", 40, 500, texts),
        Fault("unusable or exchanged tokenizers", 9, 90, tokenizers, slow=False),
    ],
    43: [Fault("shards of 100,000 documents in one process", 3, SHARDS, large_shards)],
}
