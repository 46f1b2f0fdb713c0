"""Values for the tests of keys: all different, all with a canonical form.

Imports nothing but the standard library and modules that import no more, so that any supported
Python can load it without the project's dependencies (see `tests/pipeline/identity/test_keys.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Annotated, Any

from models.shape import presets
from pipeline.identity.fingerprint import Runtime, canonical, digest, without_defaults
from training.config import OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Adam:
    """One of two classes with the same fields."""

    lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Lion:
    """The other one."""

    lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class AdamChild(Adam):
    """A subclass that adds no field: another class all the same."""


@dataclasses.dataclass(frozen=True)
class AdamWide(Adam):
    """A subclass with one more field; `lr` is inherited."""

    beta: float = 0.9


@dataclasses.dataclass(frozen=True)
class Outer:
    """A config with a runtime field and a nested config."""

    inner: Any = None
    name: str = "x"
    log_every: Annotated[int, Runtime] = 1


@dataclasses.dataclass(frozen=True)
class OuterStrict(Outer):
    """Takes the runtime mark off an inherited field."""

    log_every: int = 1


class Space:
    """A namespace: the class in it is not the one outside."""

    @dataclasses.dataclass(frozen=True)
    class Adam:
        """Same name, same field."""

        lr: float = 1e-3


class Colour(enum.Enum):
    """An enum whose members share values with plain strings."""

    RED = "red"


class Paint(enum.Enum):
    """Another enum with the same member and value."""

    RED = "red"


class Word(enum.StrEnum):
    """Members are strings."""

    RED = "red"


class Level(enum.IntEnum):
    """Members are integers."""

    ONE = 1


class Bits(enum.IntFlag):
    """Flags; unknown bits are kept and have no name."""

    A = 1
    B = 2


def nested(depth: int, leaf: Any) -> Any:
    """`leaf` inside `depth` configs."""
    value = leaf
    for _ in range(depth):
        value = Outer(inner=value)
    return value


def boxed(depth: int, leaf: Any) -> Any:
    """`leaf` inside `depth` lists."""
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


NFC, NFD = "\u00e9", "e\u0301"

# Pairs that are easily taken for one another; the numbers of the two are never equal.
DIFFERENT: list[tuple[Any, Any]] = [
    *((0, False), (1, True), (0, None), (0, 0.0), (1, 1.0), (0.0, -0.0), (1, "1"), (1.0, "1.0")),
    *((None, "None"), (None, ""), (None, ()), (True, "true"), (True, "True"), ("", b"")),
    *(("a", b"a"), ("61", b"a"), ("a", "a "), ("a", "A"), (NFC, NFD), ("\u0430", "a")),
    *(("a\0", "a"), ("\U0001f600", "\\ud83d\\ude00"), ("\ufeff", ""), ("\uff0f", "/")),
    *((math.inf, -math.inf), (math.inf, "inf"), (1e308, math.inf), (5e-324, 0.0)),
    *((0.1, 0.1 + 2**-56), (1.0, 1.0 + 2**-52), (2**53, 2**53 + 1), (2**53, float(2**53))),
    *((10**5000, 10**5000 + 1), (10**5000, -(10**5000)), (2**1024, hex(2**1024))),
    *(((1,), [1]), ((), []), ([], {}), ({}, None), ([[]], []), ([None], []), ((1,), 1)),
    *(([1, 2], [2, 1]), ([1, 2], [1, 2, None]), ([[1], 2], [[1, 2]]), (["ab"], ["a", "b"])),
    *(({1: 2}, {"1": 2}), ({1: 2}, {True: 2}), ({1: 2}, {1.0: 2}), ({None: 1}, {"None": 1})),
    *(({1: 2}, {2: 1}), ({"a": 1}, {"a": 1, "b": None}), ({(1, 2): 0}, {"(1, 2)": 0})),
    *(({"a": 1}, [("a", 1)]), ({"a": 1}, [["a", 1]]), ({"a": 1}, {"a"}), ({b"a": 1}, {"a": 1})),
    *(({1}, [1]), ({1}, (1,)), ({1}, {True}), ({1}, {"1"}), (set(), ()), ({1, 2}, {1})),
    *((Adam(), Lion()), (Adam(), AdamChild()), (AdamChild(), AdamWide()), (Adam(), Space.Adam())),
    *((Adam(), {"lr": 1e-3}), (Adam(), {"class": "Adam", "fields": {"lr": 1e-3}})),
    *((AdamWide(), AdamWide(beta=0.8)), (AdamWide(), AdamWide(lr=1e-2)), (Adam(1), Adam(1.0))),
    *((Outer(), OuterStrict()), (OuterStrict(), OuterStrict(log_every=2))),
    *((Outer(inner=Adam()), Outer(inner=Lion())), ([Adam()], (Adam(),)), (Adam(), [Adam()])),
    *((Colour.RED, "red"), (Colour.RED, Paint.RED), (Colour.RED, "Colour.RED")),
    *((Word.RED, "red"), (Level.ONE, 1), (Level.ONE, True), (Bits.A, 1), (Bits.A, Bits.B)),
    *((Bits(0), Bits.A), (Bits(8), Bits(16)), (Bits(8), Bits(0)), (Bits(9), Bits.A)),
    *((Bits.A | Bits.B, 3), (1.0, {"float": (1.0).hex()}), (b"a", {"bytes": "61"})),
    *((1.0, (1.0).hex()), ((1,), {"tuple": [1]}), ({1}, {"set": [1]}), ({}, {"dict": []})),
    *((nested(50, 1), nested(50, 2)), (nested(50, 1), nested(51, 1)), (boxed(60, 1), boxed(61, 1))),
]

# Pairs that say the same thing.
EQUAL: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: 0, "1": 0, None: 0}, {None: 0, "1": 0, 1: 0}),
    ({3, 1, 2}, {2, 3, 1}),
    ({1, "1", None, 1.5}, {1.5, None, "1", 1}),
    ({1}, frozenset({1})),
    (set(), frozenset()),
    (frozenset({Adam(), Lion()}), {Lion(), Adam()}),
    (Outer(log_every=1), Outer(log_every=9)),
    ([Outer(inner=Outer(log_every=3))], [Outer(inner=Outer())]),
    (0.1 + 0.2, 0.30000000000000004),
    (1e-3, 0.001),
    (10**20, 100000000000000000000),
    (Adam(), Adam(lr=0.001)),
    (Bits.A | Bits.B, Bits(3)),
    ("\u00e9", "é"),
]

PRESETS: dict[str, Any] = {
    "llama_200m": presets.llama_200m,
    "tiny": presets.tiny,
    "optimizer": OptimizerConfig(),
    "train": TrainConfig(steps=1, batch_size=1, sequence_length=2),
}


def digests() -> dict[str, str]:
    """Digest of every value of this file, by where it stands."""
    named: dict[str, Any] = dict(PRESETS)
    for table, pairs in (("different", DIFFERENT), ("equal", EQUAL)):
        for index, pair in enumerate(pairs):
            named |= {f"{table}[{index}].{side}": v for side, v in zip("ab", pair, strict=True)}
    return {name: digest(without_defaults(canonical(value))) for name, value in named.items()}
