"""A field changes the key when, and only when, it is not marked Runtime: every field there is."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from experiments.run_200m import experiment
from pipeline import InputError
from pipeline.graph.step import as_node
from tests.pipeline.identity.identity_fields import bare, change, leaves, library

SMOKE = dataclasses.replace(experiment.presets["smoke"], train_tokens=9_000)
LEAVES = leaves()


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
def test_a_field_changes_the_key_unless_it_is_runtime(leaf):
    """One field of one step is changed, everything else kept."""
    before, after = leaf.nodes()
    values = {**after.config, **after.runtime}
    assert values != {**before.config, **before.runtime}, "the field must really have changed"
    assert (after.key != before.key) == (not leaf.runtime)


def test_every_step_and_every_configuration_was_found():
    """The steps and classes that reflection found are those that are there to be found."""
    names = {step.name for step in library()}
    assert names >= {"sample", "train_tokenizer", "tokenize", "block_shuffle", "train", "evaluate"}
    paths = {leaf.name for leaf in LEAVES}
    for owner in ("model", "optimizer"):
        config = getattr(SMOKE, owner)
        above = {".".join(path.split(".")[:3]) for path in paths}
        assert {f"train.{owner}.{f.name}" for f in dataclasses.fields(config)} <= above
    assert "train.optimizer.head.beta1" in paths
    rules = SMOKE.training.parallel.rules
    assert {f"train.train.parallel.rules.{f.name}" for f in dataclasses.fields(rules)} <= paths
    assert 15 <= sum(leaf.runtime for leaf in LEAVES) <= len(LEAVES) // 2


def _settings_leaves() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []

    def visit(kind: Any, path: tuple[str, ...]) -> None:
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            inner = bare(hints[field.name])
            if dataclasses.is_dataclass(inner):
                visit(inner, (*path, field.name))
            else:
                found.append((*path, field.name))

    visit(type(SMOKE), ())
    return found


@pytest.mark.parametrize("path", _settings_leaves(), ids=".".join)
def test_every_flag_of_the_experiment_does_something_or_is_runtime(path):
    """A flag of the 200M experiment moves the report's key; where and how to run does not."""
    runtime = {leaf.path[1:] for leaf in LEAVES if leaf.runtime and leaf.step.name == "train"}
    before = as_node(experiment.build(SMOKE)).key
    if path == ("hardware",):  # a name that only `pod` can check
        changed = dataclasses.replace(SMOKE, hardware="cpu-2x2")
    else:
        changed = change(type(SMOKE), SMOKE, list(path))
    if path in (("model", "context"), ("training", "sequence_length")):
        # Both say how long a sequence is, and must agree with the shuffle's.
        with pytest.raises(InputError, match="sequence"):
            experiment.build(changed)
        return
    after = as_node(experiment.build(changed)).key
    same = path == ("hardware",) or (path[0] == "training" and path[1:] in runtime)
    assert (before == after) == same
