"""Muon against Newton-Schulz in float64, layer by layer, and which parameters are its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.named as hax
from models.transformer import Transformer
from tests.training import tiny
from training.checkpoint.tree_names import flatten
from training.config import AxisRules, OptimizerConfig, Parallelism
from training.optimizer import build
from training.parameter_roles import matrix_axes, role_of
from training.sharding.layout import is_named, make_layout
from training.sharding.newton_schulz import newton_schulz as iterated
from training.sharding.newton_schulz import orthogonalize

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon

# Axes with sizes, and the number of axes that are inputs, of the matrices that a block may have.
MATRICES = {
    "query": ((("embed", 12), ("kv_heads", 2), ("q_per_kv", 3), ("head_size", 4)), 1),
    "key": ((("embed", 12), ("kv_heads", 2), ("head_size", 4)), 1),
    "output": ((("kv_heads", 2), ("q_per_kv", 3), ("head_size", 4), ("embed", 12)), 3),
    "gate": ((("embed", 12), ("mlp", 20)), 1),
    "down": ((("mlp", 20), ("embed", 12)), 1),
}


def newton_schulz(x, steps=5):
    """The iteration of one matrix, float64."""
    a, b, c = COEFFICIENTS
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def flat(array, inputs):
    """[inputs..., outputs...] as a matrix."""
    return array.reshape(int(np.prod(array.shape[:inputs])), -1)


def draw(rng, layers):
    """Random float64 arrays [layers, ...] of all matrices."""
    return {
        name: rng.normal(size=(layers, *(size for _, size in axes)))
        for name, (axes, _) in MATRICES.items()
    }


def named(tree):
    """The arrays of `draw` as float32 named arrays."""
    return {
        name: hax.named(
            jnp.asarray(value, jnp.float32), ("layers", *(axis for axis, _ in MATRICES[name][0]))
        )
        for name, value in tree.items()
    }


MOMENTS = AxisRules(params=(), optimizer_state=(("embed", ("fsdp",)),))
SPLIT = [
    {"sharding": "fsdp", "group": 4},
    {"sharding": "zero1", "group": 2, "tensor": 2},
    {"sharding": "fsdp", "group": 4, "sequence": 2},
    {"sharding": "replicated", "tensor": 2},
    {"sharding": "replicated"},
    {"sharding": "zero1", "group": 4, "rules": MOMENTS},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "dtype", "error"),
    [*((parallel, "float32", 1e-5) for parallel in SPLIT), (SPLIT[0], "bfloat16", 0.03)],
)
def test_eight_devices_share_the_matrices(parallel, dtype, error):
    """Three layers, which nothing divides: as on one device, and as NumPy's, by Frobenius norms."""
    given = draw(np.random.default_rng(1), layers=3)
    layout = make_layout(jax.devices(), Parallelism(**parallel))
    shardings = layout.shardings(named(given))
    one = functools.partial(iterated, steps=5)
    run = functools.partial(orthogonalize, one=one, dtype=dtype)
    shared = jax.jit(functools.partial(run, layout=layout), in_shardings=(shardings,))(named(given))
    alone = jax.jit(run)(named(given))
    for name, (_, inputs) in MATRICES.items():
        for layer in range(3):
            want = newton_schulz(flat(given[name][layer], inputs))
            for found in (shared, alone):
                got = flat(np.asarray(found[name].array[layer], np.float64), inputs)
                assert np.linalg.norm(got - want) < error * np.linalg.norm(want)


@pytest.mark.slow
def test_everything_else_is_adamw_without_the_ratio():
    """Embedding, head, norms and biases move as under kind="adamw", whatever Muon's rate."""
    config = dataclasses.replace(tiny.MODEL, tied=False, layers=1)
    model = jax.jit(lambda key: Transformer.init(config, key=key))(jax.random.key(0))
    gradient = jax.tree.map(np.cos, model)
    muon = OptimizerConfig(kind="muon", muon_learning_rate=0.02, clip_norm=1e6)
    found = {}
    for kind in ("muon", "adamw"):
        optimizer = build(dataclasses.replace(muon, kind=kind))
        direction = jax.jit(lambda g, m, o=optimizer: o.update(g, o.init(m), m)[0])
        found[kind] = flatten(direction(gradient, model))
    same = {n for n, x in found["muon"].items() if np.allclose(x, found["adamw"][n], rtol=1e-5)}
    assert {name.split(".")[-1] for name in same} == {"embedding", "head", "weight"}
    assert {name.split(".")[-2] for name in found["muon"].keys() - same} == {
        *("query", "key", "value", "output", "gate", "up", "down")
    }


def array(*axes):
    """Zeros with these axis names."""
    return hax.zeros([hax.Axis(name, 3 + i) for i, name in enumerate(axes)])


@pytest.mark.parametrize(
    ("name", "axes", "role"),
    [
        ("fused", ("layers", "embed", "gate_up", "mlp"), "matrices"),
        ("head", ("vocab", "embed"), "head"),
        ("embedding", ("vocab", "embed"), "embedding"),
        ("position_embedding", ("position", "embed"), "embedding"),
        ("value_embedding", ("layers", "vocab", "embed"), "value_embedding"),
        ("value_gate", ("layers", "embed", "kv_heads"), "vectors"),
        ("residual_scale", ("layers",), "residual_scale"),
        ("input_scale", ("layers",), "input_scale"),
        ("embedding_norm", ("embed",), "vectors"),
        ("query_bias", ("layers", "kv_heads", "q_per_kv", "head_size"), "vectors"),
        ("output_bias", ("layers", "embed"), "vectors"),
        ("query_norm", ("layers", "kv_heads", "head_size"), "vectors"),
        ("gains", ("layers", "kv_heads", "head_size"), "vectors"),
    ],
)
def test_names_and_axes_decide_the_role(name, axes, role):
    """What is no matrix between "embed" and something else is none of Muon's."""
    for tree in ({name: array(*axes)}, {"blocks": {"stacked": {name: array(*axes)}}}):
        assert jax.tree.leaves(roles(tree)) == [role]


def roles(tree):
    """The role of every parameter of a tree."""
    return jax.tree_util.tree_map_with_path(role_of, tree, is_leaf=is_named)


def test_every_parameter_of_a_model_has_its_role():
    """Of a model with all that a model may have today, by the last name on its path."""
    config = dataclasses.replace(
        tiny.MODEL, tied=False, positions="learned", context=32, biases=True, qk_norm=True
    )
    model = jax.eval_shape(lambda key: Transformer.init(config, key=key), jax.random.key(0))
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.setdefault(role_of(path, leaf), set()).add(name)
    assert found.keys() == {"matrices", "embedding", "head", "vectors"}
    assert found["embedding"] == {"embedding", "position_embedding"}
    assert found["head"] == {"head"}
    assert {name.split(".")[-2] for name in found["matrices"] if name.endswith(".matrix")} == {
        *("query", "key", "value", "output", "gate", "up", "down")
    }
    assert len(found["matrices"]) == 7
    assert all("norm" in name or "bias" in name for name in found["vectors"])


def test_the_models_matrices_are_seen_inputs_first():
    """Input and output axes of every matrix of the model, by name."""
    model = jax.eval_shape(lambda key: Transformer.init(tiny.MODEL, key=key), jax.random.key(0))
    found = {}
    paths = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named)[0]
    for (path, leaf), role in zip(paths, jax.tree.leaves(roles(model)), strict=True):
        if role == "matrices":
            sides = [[leaf.axes[i].name for i in side] for side in matrix_axes(leaf)]
            found[jax.tree_util.keystr(path).split(".")[-2]] = sides
    heads, kv = ["kv_heads", "q_per_kv", "head_size"], ["kv_heads", "head_size"]
    assert found == {
        "query": [["embed"], heads],
        "key": [["embed"], kv],
        "value": [["embed"], kv],
        "output": [heads, ["embed"]],
        "gate": [["embed"], ["mlp"]],
        "up": [["embed"], ["mlp"]],
        "down": [["mlp"], ["embed"]],
    }


def test_an_unclear_matrix_is_refused():
    """With embed between other axes nothing says what the inputs are."""
    with pytest.raises(AssertionError, match="inputs first"):
        matrix_axes(array("layers", "kv_heads", "embed", "head_size"))
