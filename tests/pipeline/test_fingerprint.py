"""Keys: equal when, and only when, two configurations say the same thing."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import subprocess
import sys
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.fingerprint import Runtime, canonical, difference, digest


@dataclasses.dataclass(frozen=True)
class Adam:
    """One of two classes with the same fields."""

    lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Lion:
    """The other one."""

    lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Outer:
    """A config with a runtime field and a nested config."""

    inner: Any = None
    name: str = "x"
    log_every: Annotated[int, Runtime] = 1


@dataclasses.dataclass
class Mutable:
    """Not frozen."""

    x: int = 0


class Colour(enum.Enum):
    """An enum whose members share values with plain strings."""

    RED = "red"


def _nested(depth: int, leaf: int) -> Any:
    value: Any = leaf
    for _ in range(depth):
        value = Outer(inner=value)
    return value


DISTINCT = [
    *(None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, 1e-3, math.inf, -math.inf),
    *("", "1", "1.0", "None", "true", "red", "0x1.0p+0", b"1", Colour.RED),
    *([], (), {}, [1], (1,), [[1]], [1, 2], [2, 1], {1: 2}, {"1": 2}, {1: "2"}, {1}, {"1"}),
    *(frozenset({2}), Adam(), Lion(), Adam(lr=2e-3), Outer(), Outer(inner=Adam()), Outer(name="y")),
    *(Outer(inner=Lion()), [Adam()], (Adam(),), {"lr": 1e-3}, {"float": 1}, {"class": "Adam"}),
    *(_nested(50, 1), _nested(50, 2), _nested(51, 1)),
]


def test_every_pair_of_different_values_gets_different_bytes():
    """Values that Python tells apart, or whose classes differ, never share a key."""
    digests = [digest(canonical(value)) for value in DISTINCT]
    for (a, first), (b, second) in itertools.combinations(zip(DISTINCT, digests, strict=True), 2):
        assert first != second, (a, b)


def test_runtime_fields_are_not_part_of_the_key():
    """A field marked Runtime changes nothing, every other field of the class does."""
    base = digest(canonical(Outer()))
    assert digest(canonical(Outer(log_every=7))) == base
    assert digest(canonical(Outer(name="y"))) != base
    assert digest(canonical(Outer(inner=1))) != base


def test_order_of_dicts_and_sets_does_not_matter():
    """Insertion order is not content."""
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({3, 1, 2}) == canonical({2, 3, 1})


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        lambda: 0,
        object(),
        Mutable(),
        {"a": [math.nan]},
        Outer(inner=print),
        int,
        {1.5 + 2j},
    ],
)
def test_values_without_a_canonical_form_are_refused(value):
    """What cannot be written down exactly raises, naming the path."""
    with pytest.raises(InputError, match="config"):
        canonical(value)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
)


def _same(a: Any, b: Any) -> bool:
    """Equality that also compares types and the sign of zero: the oracle for canonical bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        keys = sorted(a, key=repr)
        return keys == sorted(b, key=repr) and all(
            any(_same(k, other) and _same(a[k], b[other]) for other in b) for k in keys
        )
    return a == b


@given(TREES, TREES)
def test_canonical_bytes_agree_with_strict_equality(a, b):
    """Canonical trees are equal exactly when the values are strictly equal."""
    assert (digest(canonical(a)) == digest(canonical(b))) == _same(a, b)


@given(TREES)
def test_canonical_trees_survive_json(tree):
    """A key recomputed from a stored manifest is the same key."""
    assert json.loads(json.dumps(canonical(tree))) == canonical(tree)


@given(TREES, TREES)
def test_difference_is_empty_only_for_equal_trees(a, b):
    """Explaining never stays silent about a change, nor invents one."""
    old, new = canonical(a), canonical(b)
    assert (difference(old, new) == []) == (old == new and json.dumps(old) == json.dumps(new))


def test_difference_names_the_field_and_both_values():
    """The reason a user reads is the dotted field, old value and new value."""
    old, new = canonical(Outer(inner=Adam(lr=1e-3))), canonical(Outer(inner=Adam(lr=0.5)))
    assert difference(old, new, "optimizer") == ["optimizer.inner.lr: 0.001 -> 0.5"]


def test_keys_are_the_same_in_every_process():
    """Neither the hash seed nor the process changes a key."""
    script = (
        "from tests.pipeline.test_fingerprint import *;"
        "print(digest([canonical(v) for v in DISTINCT]))"
    )
    here = digest([canonical(value) for value in DISTINCT])
    for seed in ("0", "1", "77"):
        environment = {**__import__("os").environ, "PYTHONHASHSEED": seed}
        there = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.strip() == here
