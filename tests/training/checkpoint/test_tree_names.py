"""Names and descriptions of arrays: a round trip, and differences told in words."""

import jax
import jax.numpy as jnp
import pytest

from tests.training import tiny
from training.checkpoint import tree_names


def test_flatten_and_unflatten_are_inverse():
    """A state survives the trip through its flat form."""
    state = tiny.program().init()
    flat = tree_names.flatten(state)
    assert len(flat) == len(jax.tree.leaves(state))
    assert tree_names.describe(state)["model.embedding"] == {
        "axes": ["vocab", "embed"],
        "shape": [tiny.VOCAB, 32],
        "dtype": "float32",
    }
    again = tree_names.unflatten(state, flat)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert tiny.equal(state, again)


ENTRY = {"axes": ["mlp", "embed"], "shape": [2, 3], "dtype": "float32"}
STORED = {"a": ENTRY, "b": {"axes": None, "shape": [], "dtype": "int32"}}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({**STORED, "c": ENTRY}, "'c' is missing"),
        ({"a": ENTRY}, "'b' is not part of this model"),
        ({**STORED, "a": {**ENTRY, "shape": [2, 4]}}, r"'a' is float32\[mlp 2, embed 3\].*embed 4"),
        ({**STORED, "a": {**ENTRY, "dtype": "bfloat16"}}, r"'a' is float32.*needs bfloat16"),
        ({**STORED, "a": {**ENTRY, "axes": ["embed", "mlp"]}}, r"needs float32\[embed 2, mlp 3\]"),
        ({**STORED, "b": {"axes": None, "shape": [1], "dtype": "int32"}}, r"'b' is int32\[\]"),
    ],
)
def test_mismatch_names_the_array(wanted, words):
    """Every kind of difference names the array; equal descriptions have none."""
    import re

    assert tree_names.mismatch(STORED, STORED) is None
    assert re.search(words, tree_names.mismatch(STORED, wanted))


def test_descriptions_of_arrays_and_of_their_shapes_are_equal():
    """Abstract and concrete trees are described alike, so a plan can be compared with a file."""
    program = tiny.program()
    assert tree_names.describe(program.abstract) == tree_names.describe(program.init())
    assert tree_names.describe({"x": jnp.zeros((2,), jnp.int8)})["x"] == {
        "axes": None,
        "shape": [2],
        "dtype": "int8",
    }
