"""A licence is said where its data enters: in `plan`, and on the cards of what was made of it."""

from types import SimpleNamespace

import pytest

from data.sources import named_source
from pipeline.graph.step import as_node
from pipeline.identity.listing import Listing
from pipeline.plan.facts import state
from steps.documents.sample import sample
from steps.documents.transform import filter_documents, map_documents
from steps.exchange.source_licenses import known_licenses, licenses, restrictions

NO_SALE = "karpathy/climbmix-400b-shuffle: CC BY-NC 4.0, which forbids commercial use"


def short(document):
    return len(document["text"]) < 100


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (named_source("climbmix"), f"licence of {NO_SALE}"),
        (named_source("wikipedia"), "licence of wikimedia/wikipedia: CC BY-SA 3.0 and GFDL"),
        ("hf://datasets/someone/texts@" + "0" * 40 + "/*.parquet", None),
    ],
)
def test_plan_has_a_line(source, line):
    nodes = [as_node(sample(source, tokens=1000)), as_node(filter_documents(source, keep=short))]
    facts, same = state(nodes, {}).values()
    assert same == facts
    assert facts.lines == ((line,) if line else ())
    assert facts.data.get("license", {}).get("commercial") == (
        None if line is None else "forbids" not in line
    )
    assert not facts.refusal


def test_documents_of_a_step_have_no_licence_of_their_own():
    kept = filter_documents(named_source("climbmix"), keep=short)
    nodes = [as_node(sample(kept, tokens=1000)), as_node(map_documents(kept, by=short))]
    assert [facts.lines for facts in state(nodes, {}).values()] == [(), ()]


def ancestor(*sources):
    summaries = {f"source{i}": Listing(url).summary for i, url in enumerate(sources)}
    return SimpleNamespace(manifest=SimpleNamespace(sources=summaries))


def test_cards_have_the_licences_that_are_known():
    local, edu, mix = "/data/docs", named_source("fineweb-edu"), named_source("climbmix")
    known = known_licenses([ancestor(mix), ancestor(local, edu), ancestor(edu)])
    heading = ["## Licences of the sources", ""]
    expected = ["- HuggingFaceFW/fineweb-edu: ODC-By 1.0", f"- {NO_SALE}"]
    assert licenses(known, ["ours: MIT | x"]) == [*heading, *expected, "- ours: MIT \\| x", ""]
    assert f"- {NO_SALE}" in restrictions(known)
    assert "fineweb-edu" not in "".join(restrictions(known))
    assert licenses({}, ()) == [*heading, "Not stated in the export.", ""]
    assert restrictions(known_licenses([ancestor(local, edu)])) == []
