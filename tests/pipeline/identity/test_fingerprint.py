"""Keys: equal when, and only when, two configurations say the same thing."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.identity.fingerprint import (
    MAX_DEPTH,
    Runtime,
    canonical,
    difference,
    digest,
    group_fields,
    is_runtime,
    without_defaults,
)
from tests.pipeline.identity.key_values import (
    DIFFERENT,
    EQUAL,
    Adam,
    AdamChild,
    Bits,
    Colour,
    Level,
    Lion,
    Outer,
    Word,
    boxed,
    nested,
)

if TYPE_CHECKING:
    from fractions import Fraction


@dataclasses.dataclass
class Mutable:
    """Not frozen."""

    x: int = 0


@dataclasses.dataclass(frozen=True)
class Text(str):
    """A dataclass that is also text: its characters are in no field."""

    note: str = ""


@dataclasses.dataclass(frozen=True)
class Unresolvable:
    """Its annotation is imported for type checking only."""

    x: Fraction | None = None


class Subclass(str):
    """Text with a class of its own."""

    __slots__ = ()


class Count(int):
    """An integer with a class of its own."""


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize("index", range(len(DIFFERENT)))
def test_values_that_are_easily_confused_differ(index):
    """Pairs that equality, printing or JSON would take for one another."""
    a, b = DIFFERENT[index]
    assert digest(canonical(a)) != digest(canonical(b))
    assert difference(canonical(a), canonical(b)) != []


@pytest.mark.parametrize("index", range(len(DIFFERENT)))
def test_a_value_that_is_easily_confused_with_the_default_is_not_the_default(index):
    """It is written out, as Python's own equality of 1 and True would not do."""
    for default, value in (DIFFERENT[index], DIFFERENT[index][::-1]):
        grouped = group_fields({"x": canonical(value)}, {"x": canonical(default)})
        assert grouped["fields"] == {"x": canonical(value)}
        same_as_default = group_fields({"x": canonical(value)}, {"x": canonical(value)})
        assert digest(without_defaults(grouped)) != digest(without_defaults(same_as_default))


@pytest.mark.parametrize("index", range(len(EQUAL)))
def test_values_that_say_the_same_are_equal(index):
    """Order of dicts and sets, runtime fields and ways of writing a number are no content."""
    a, b = EQUAL[index]
    assert digest(canonical(a)) == digest(canonical(b))
    assert difference(canonical(a), canonical(b)) == []


def _ring() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def _ring_of_dicts() -> dict[str, Any]:
    first: dict[str, Any] = {}
    first["second"] = {"first": [first, first]}
    return first


def _ring_of_configs() -> Outer:
    outer = Outer()
    object.__setattr__(outer, "inner", (outer,))
    return outer


def _local_class() -> Any:
    @dataclasses.dataclass(frozen=True)
    class Local:
        x: int = 0

    return Local()


def _local_enum() -> Any:
    class Hidden(enum.Enum):
        A = 1

    return Hidden.A


REFUSED: list[Any] = [
    *(math.nan, -math.nan, float("nan"), 1j, {"a": [math.nan]}, {math.nan: 1}, (1, {math.nan})),
    *(lambda: 0, print, len, str.upper, "x".upper, int, Adam, Colour, Outer(inner=print)),
    *(object(), NotImplemented, ..., Mutable(), [Mutable()], Outer(inner=Mutable()), {1.5 + 2j}),
    *(np.float64(1), np.float32(1), np.int64(1), np.bool_(True), np.str_("a"), np.zeros(2)),
    *(np.dtype("int32"), Count(1), Subclass("a"), Text("a"), Pair(1, 2), bytearray(b"a")),
    *(collections.OrderedDict(a=1), collections.Counter("a"), collections.defaultdict(int)),
    *(types.MappingProxyType({}), {}.keys(), iter([1]), range(3), slice(3), memoryview(b"a")),
    *(datetime.date(2026, 1, 1), decimal.Decimal("1"), pathlib.Path("a"), collections.deque()),
    *("\ud83d\ude00", "\udcff", "a\ud800", {"\udfff": 1}, ["\ud83d", "\ude00"]),
    *(_ring(), _ring_of_dicts(), _ring_of_configs(), nested(MAX_DEPTH + 1, 1), boxed(5000, 1)),
    *(_local_class(), _local_enum(), Unresolvable()),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_without_a_canonical_form_are_refused(value):
    """What cannot be written down exactly raises, naming the path."""
    with pytest.raises(InputError, match=r"config|Unresolvable") as caught:
        canonical(value)
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()


def test_the_deepest_value_goes_through_a_manifest():
    """What `canonical` accepts can be written, read and compared: no limit lies below its own."""
    dicts: Any = 1
    for _ in range(MAX_DEPTH):
        dicts = {"a": dicts}
    for value in (nested(MAX_DEPTH, 1), boxed(MAX_DEPTH, 1), dicts):
        tree = canonical(value)
        record = dataclasses.asdict(Outer(inner={"config": tree}))
        assert json.loads(json.dumps(record, indent=1))["inner"]["config"] == tree
        assert difference(tree, tree) == []


def test_runtime_must_mark_the_whole_annotation():
    """A mark inside a union or a tuple would silently mean nothing, and is refused."""
    assert is_runtime(Annotated[int | None, Runtime])
    assert is_runtime(Annotated[int, "metres", Runtime()])
    assert not is_runtime(Annotated[int, "metres"])
    assert not is_runtime(int)
    for wrong in (Annotated[int, Runtime] | None, tuple[Annotated[int, Runtime], ...]):
        with pytest.raises(InputError, match="whole field"):
            is_runtime(wrong)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=4)
    | st.sampled_from([Colour.RED, Word.RED, Level.ONE, Bits.A, Bits(0), Bits(8), 2**2000])
)
# Values that print, compare or hash alike: with so few of them, equal trees come up often.
CONFUSABLE = st.sampled_from(
    [0, False, 0.0, -0.0, None, "", b"", "0", "None", 1, True, 1.0, "1", b"1", Adam(1), Lion(1)]
)


def _trees(leaves: Any) -> Any:
    keys = st.text(max_size=3) | st.integers(-2, 2) | st.booleans() | st.none()

    def grow(inner: Any) -> Any:
        return (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
            | st.sets(leaves, max_size=3)
            | st.sets(leaves, max_size=3).map(frozenset)
            | st.builds(Outer, inner=inner, name=st.sampled_from("xy"), log_every=st.integers())
            | st.builds(AdamChild, lr=leaves)
        )

    return st.recursive(leaves, grow, max_leaves=8)


TREES = _trees(LEAVES)
CLOSE_TREES = _trees(CONFUSABLE)


def _same(a: Any, b: Any) -> bool:
    """Whether two values say the same thing, by walking both: the oracle for canonical bytes."""
    if isinstance(a, set | frozenset) and isinstance(b, set | frozenset):
        return _same_members(list(a), list(b), _same)
    if type(a) is not type(b):
        return False
    if isinstance(a, enum.Enum):
        return a is b or (a.value == b.value and a.name == b.name)
    if isinstance(a, float):
        return struct_bytes(a) == struct_bytes(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):

        def same_item(x: Any, y: Any) -> bool:
            return _same(x[0], y[0]) and _same(x[1], y[1])

        return _same_members(list(a.items()), list(b.items()), same_item)
    if dataclasses.is_dataclass(a):
        left_out = {"log_every"} if type(a) is Outer else set()
        names = {field.name for field in dataclasses.fields(a)} - left_out
        return all(_same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


def struct_bytes(value: float) -> bytes:
    """The eight bytes of a float."""
    return np.float64(value).tobytes()


def _same_members(a: list[Any], b: list[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether two bags have the same members: each of one takes its match out of the other."""
    if len(a) != len(b):
        return False
    left = list(b)
    for item in a:
        match = next((i for i, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


@pytest.mark.slow
@given(TREES, TREES)
def test_canonical_bytes_agree_with_strict_equality(a, b):
    """Canonical trees are equal exactly when the values say the same."""
    assert (digest(canonical(a)) == digest(canonical(b))) == _same(a, b)


@pytest.mark.slow
@settings(max_examples=400)
@given(CLOSE_TREES, CLOSE_TREES)
def test_canonical_bytes_of_confusable_values_agree_with_strict_equality(a, b):
    """The same over values that are equal to Python, or look it."""
    assert (digest(canonical(a)) == digest(canonical(b))) == _same(a, b)
    assert digest(canonical([a, b])) != digest(canonical([[a], b]))


@given(TREES)
def test_canonical_trees_survive_json(tree):
    """A key recomputed from a stored manifest is the same key."""
    assert json.loads(json.dumps(canonical(tree))) == canonical(tree)


@pytest.mark.slow
@given(TREES, TREES)
def test_difference_is_empty_only_for_equal_trees(a, b):
    """Explaining never stays silent about a change, nor invents one."""
    old, new = canonical(a), canonical(b)
    assert (difference(old, new) == []) == (old == new and json.dumps(old) == json.dumps(new))


def test_difference_names_the_field_and_both_values():
    """The reason a user reads is the dotted field, old value and new value."""
    old, new = canonical(Outer(inner=Adam(lr=1e-3))), canonical(Outer(inner=Adam(lr=0.5)))
    assert difference(old, new, "optimizer") == ["optimizer.inner.lr: 0.001 -> 0.5"]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [(0.1, 1, "0.1 -> 1"), (None, 0.5, "None -> 0.5"), ((1, 0.5), None, "[1, 0.5] -> None")],
)
def test_difference_shows_values_of_two_types_as_people_write_them(old, new, shown):
    """No tag of the canonical form where a float replaces an int or None."""
    assert difference(canonical(old), canonical(new), "epochs") == [f"epochs: {shown}"]


def test_difference_shows_what_is_none_or_absent():
    """A line for a field that only one side has, unless it has its default there."""
    assert difference({"a": 1}, {"a": 1, "b": None}) == ["b: (absent) -> None"]
    assert difference({"a": 1, "b": None}, {"a": 1}) == ["b: None -> (absent)"]
    assert difference({"b": None}, {"b": 2}) == ["b: None -> 2"]
    old = group_fields({"a": 1}, {})
    assert difference(old, group_fields({"a": 1, "b": None}, {})) == ["b: (absent) -> None"]
    assert difference(old, group_fields({"a": 1, "b": None}, {"b": None})) == []
    assert difference(group_fields({"b": 1}, {"b": 1}), group_fields({"b": 2}, {"b": 2})) == [
        "b: 1 -> 2 (the default changed)"
    ]
