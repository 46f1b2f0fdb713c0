"""Which graphs run without Ray: those whose sources are known to be small, on local hardware."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from pipeline import Artifact, External, Result, Runtime, StepContext, local, pod, step
from pipeline.errors import StoreUnavailable
from pipeline.execute.backend import why_small
from pipeline.graph.hardware import Hardware
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.identity.listing import ListedFile, Listing
from pipeline.plan.listings import list_all


class Thing(Artifact):
    """Anything."""


def sized(value: str, seconds: float) -> Listing:
    """`value` names how many bytes there are, or why that is unknown."""
    if value == "gone":
        raise StoreUnavailable("no answer")
    if value == "pinned":
        return Listing(value, pinned="for ever")
    if value.startswith("<"):
        return Listing(value, pinned="for ever", limit=int(value[1:]))
    return Listing(value, (ListedFile("a", int(value)), ListedFile("b", 0)))


@step(output=Thing, version=1)
def read(run: StepContext, *, source: Annotated[str | None, External(sized)]) -> Result:
    return {}


@step(output=Thing, version=1)
def make(run: StepContext) -> Result:
    return {}


@step(output=Thing, version=1, memory=2**30)
def large(run: StepContext, given: tuple[Thing, ...]) -> Result:
    return {}


@step(output=Thing, version=1)
def compute(
    run: StepContext,
    given: tuple[Thing, ...],
    *,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    return {}


def small(wanted: Any, needed: int | None = None) -> bool:
    """Whether a run of the last `needed` nodes (all, if None) is small."""
    order = topological([as_node(wanted)])
    chosen = order if needed is None else order[len(order) - needed :]
    return bool(why_small(order, chosen, list_all(order)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1000", True),
        ("<1000", True),
        (str(2**26), True),
        (str(2**26 + 1), False),
        ("<67108865", False),
        ("pinned", False),
        ("gone", False),
        (None, False),
    ],
)
def test_sources_must_be_known_and_small(source, expected):
    assert small(compute((read(source=source),))) is expected


def test_sizes_of_different_sources_add_up_and_one_source_counts_once():
    half = str(2**25)
    assert small(compute((read(source=half), read(source=half))))
    assert not small(compute((read(source=half), read(source=half + "0"))))
    assert small(compute((read(source="1000"), read(source=None))))


def test_a_graph_that_reads_no_source_is_small():
    assert small(compute((make(), make())))
    assert not small(compute((make(), read(source="pinned"))))


def test_steps_that_must_run_decide_what_hardware_is_wanted():
    read_it = read(source="1000")
    assert not small(compute((read_it,), hardware=pod("cpu-2x2")))
    assert not small(large((read_it,)))
    assert small(compute((large((read_it,)),)), needed=1)
