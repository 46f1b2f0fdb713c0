"""Fault 17, token cache: files that are missing, cut, changed or in each other's places.

Two sound shards of one size are damaged in one way, before they are opened or while they are open,
and read in windows of every kind. Each window is right or `CorruptOutput`; so are the offsets and
the content's digest.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from data.cache import shard_io, token_array, token_shard
from data.cache.chunks import CHUNK
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import CorruptOutput
from tests.data.token_shards import content_digest
from tests.faults.registry import Fault, trials

KINDS = (
    "delete",
    "empty",
    "truncate",
    "flip",
    "swap chunks",
    "swap files",
    "swap directories",
    "zero 4 KiB",
    "duplicate",
    "extra",
)
_VOCABULARY = 500
_RECORD = CHUNK * 2 + 4
_TOKENS = 9 * CHUNK + 100  # the last chunk is a part of one


@dataclass(frozen=True)
class Sound:
    """A shard before anything was done to it."""

    shard: TokenShard
    tokens: np.ndarray
    offsets: np.ndarray
    digest: str


def write(directory: Path, seed: int) -> Sound:
    """A shard of ten chunks of random documents."""
    lengths = np.diff([0, *sorted(random.Random(seed).sample(range(1, _TOKENS), 19)), _TOKENS]) - 1
    ids = np.random.default_rng(seed).integers(1, _VOCABULARY, lengths.sum()).astype(np.uint32)
    counts = token_shard.write_shard(
        str(directory), [(ids, lengths)], vocab_size=_VOCABULARY, eos_id=0
    )
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    tokens = np.concatenate([np.append(part, 0) for part in parts])
    offsets = np.cumsum([0, *(lengths + 1)])
    shard = TokenShard(str(directory), counts.tokens, counts.check)
    return Sound(shard, tokens, offsets, counts.digest)


def damage(kind: str, first: Path, second: Path, numbers: random.Random, only: str = "") -> None:
    """Do one kind of damage to the shard in `first`; `second` is what things are swapped with."""
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    name = only or numbers.choice([*names, *3 * ["tokens/c/0"]])
    file = first / name
    content = bytearray(file.read_bytes())
    if kind == "swap directories":
        first.rename(first.with_name("between"))
        second.rename(first)
        first.with_name("between").rename(second)
    elif kind == "swap files":
        content, other = file.read_bytes(), (second / name).read_bytes()
        file.write_bytes(other)
        (second / name).write_bytes(content)
    elif kind == "delete":
        file.unlink()
    elif kind == "extra":
        extra = numbers.choice(["x", "tokens/c/1", "tokens/c/0.tmp", "tokens/0", "offsets/c/1"])
        (first / extra).write_bytes(numbers.randbytes(numbers.randrange(5000)))
    else:
        if kind == "swap chunks":
            file = first / "tokens/c/0"
            content = bytearray(file.read_bytes())
        _change(kind, content, numbers)
        file.write_bytes(content)


def _change(kind: str, content: bytearray, numbers: random.Random) -> None:
    begin = numbers.randrange(len(content))
    if kind == "empty":
        content.clear()
    elif kind == "truncate":
        del content[begin:]
    elif kind == "flip":
        for _ in range(numbers.choice([1, 1, 2, 5])):
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    elif kind == "zero 4 KiB":
        size = min(4096, len(content) - begin)
        content[begin : begin + size] = bytes(size)
    elif kind == "swap chunks":
        one, two = (n * _RECORD for n in numbers.sample(range(_TOKENS // CHUNK), 2))
        part = content[one : one + _RECORD]
        content[one : one + _RECORD] = content[two : two + _RECORD]
        content[two : two + _RECORD] = part
    elif kind == "duplicate":
        size = numbers.choice([1, 4, 512, _RECORD, 4096])
        part = content[begin : begin + size]
        if numbers.random() < 0.5:
            content[begin:begin] = part  # what follows moves on
        else:
            content[begin + len(part) : begin + 2 * len(part)] = part
    else:
        raise AssertionError(kind)


def _windows(numbers: random.Random) -> Iterator[tuple[np.ndarray, int]]:
    """Windows of both shards: whole chunks, parts of them, across the shards' ends, everything."""
    yield np.arange(0, 8 * CHUNK, 2 * CHUNK), 2 * CHUNK
    yield np.arange(_TOKENS, _TOKENS + 8 * CHUNK, CHUNK), CHUNK
    for _ in range(4):
        length = numbers.choice([1, 64, 700, CHUNK, 3000])
        starts = [numbers.randrange(2 * _TOKENS - length) for _ in range(6)]
        yield np.array(starts), length
    yield np.array([0]), 2 * _TOKENS


def _through_tensorstore(directory: str, size: int) -> Any:
    del size
    return shard_io.StoredData(directory, {"driver": "file", "path": directory + "/"})


def _same(what: str, read: Callable[[], Any], expected: Any, seen: Counter[str]) -> None:
    try:
        found = read()
    except CorruptOutput as error:
        if "expected the shard written earlier" not in str(error):
            raise
        seen["errors"] += 1
    else:
        assert np.array_equal(found, expected), f"{what} is wrong"
        seen["right"] += 1


def _check(both: list[Sound], array: TokenArray, numbers: random.Random) -> Counter[str]:
    seen: Counter[str] = Counter()
    tokens = np.concatenate([sound.tokens for sound in both])
    for starts, length in _windows(numbers):
        expected = tokens[starts[:, None] + np.arange(length)]
        where = f"a window of {length} at {starts}"
        _same(where, lambda s=starts, n=length: array.read(s, n), expected, seen)
        for start in starts.tolist():
            expected = tokens[start : start + length]
            one = np.array([start])
            _same(
                f"{length} at {start}", lambda s=one, n=length: array.read(s, n)[0], expected, seen
            )
    for sound in both:
        directory, _, check = sound.shard
        _same(
            "offsets",
            lambda d=directory, c=check: token_shard.read_offsets(d, c),
            sound.offsets,
            seen,
        )
        _same("digest", lambda d=directory, c=check: content_digest(d, c), sound.digest, seen)
    return seen


def _suite(stored: bool) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        places = [workspace / "first", workspace / "second"]
        both = [write(place, seed) for seed, place in enumerate(places)]
        shutil.copytree(workspace, workspace.with_name(workspace.name + "-sound"))
        sound = workspace.with_name(workspace.name + "-sound")
        figures: Counter[str] = Counter()

        def trial(number: int) -> None:
            numbers, kind = random.Random(number), KINDS[number % len(KINDS)]
            for place in places:
                shutil.rmtree(place)
                shutil.copytree(sound / place.name, place)
            with TokenArray([item.shard for item in both], _VOCABULARY) as array:
                if number // len(KINDS) % 3 == 0:
                    array.read(np.array([0, _TOKENS]), 10)
                    figures["damaged while open"] += 1
                damage(kind, places[0], places[1], numbers)
                seen = _check(both, array, numbers)
            figures.update(seen)
            figures["noticed"] += seen["errors"] > 0
            assert kind != "extra" or not seen["errors"], "a file more is no damage to the others"

        try:
            if not stored:
                return {"trials": trials(seed, count, trial), **figures}
            with (
                mock.patch.object(token_array, "open_data", _through_tensorstore),
                # Local directories: the array must not take them for files it reads by itself.
                mock.patch.object(token_array.storage, "is_local", return_value=False),
            ):
                return {"trials": trials(seed, count, trial), **figures}
        finally:
            shutil.rmtree(sound)

    return run


FAULTS = {
    17: [
        Fault("damaged token cache, on a local disk", 40, 1000, _suite(stored=False)),
        Fault("damaged token cache, through TensorStore's stores", 40, 1000, _suite(stored=True)),
    ]
}
