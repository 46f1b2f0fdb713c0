"""Learnt factors, the first block's input and value embeddings: gradients, memory, first values.

The oracle is nanochat's forward pass in PyTorch, float64, written from its formulas.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.named as hax
from models.hf.architectures import describe
from models.shape.presets import tiny
from models.transformer import Forward
from tests.models import small
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.cost.memory_estimate import estimate

RECIPE = small.VARIANTS["recipe"]
PLAIN = {**RECIPE, "residual_scale": None, "input_scale": None, "value_embeddings": "none"}


def theirs(p, tokens, config):
    """Logits [batch, position, vocab] of parameters by path, [in, out] or [layers, in, out]."""
    import torch

    def norm(x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_epsilon)

    def rotated(x):
        half = config.head_size // 2
        places, features = (torch.arange(n, dtype=x.dtype) for n in (x.shape[1], half))
        angles = places[:, None] * config.rope_base ** (-features / half)
        turn = torch.exp(1j * angles)[:, None, None]
        pairs = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    block = ".blocks.stacked"
    x = first = norm(p[".embedding"][tokens])
    seen = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
    near = seen & ~torch.ones_like(seen).tril(-config.window).bool()
    for layer in range(config.layers):
        w = {name.removeprefix(block): a[layer] for name, a in p.items() if block in name}
        x = w[".residual_scale"] * x + w[".input_scale"] * first
        h = norm(x)
        q, k, v = (
            torch.einsum("bte,e...->bt...", h, w[f".attention.{name}.matrix"])
            for name in ("query", "key", "value")
        )
        if layer % 2 == (config.layers - 1) % 2:
            scores = h[..., :12] @ p[".value_gate"][layer // 2]
            rows = p[".value_embedding"][tokens][:, :, :, layer // 2]
            v = v + 3 * torch.sigmoid(scores)[..., None] * rows
        q, k = 1.2 * norm(rotated(q)), 1.2 * norm(rotated(k[..., None, :]))
        scores = torch.einsum("bikgd,bjkhd->bkgij", q, k) / math.sqrt(config.head_size)
        long = layer % 2 == 1 or layer == config.layers - 1
        weights = scores.masked_fill(~(seen if long else near), -math.inf).softmax(-1)
        mixed = torch.einsum("bkgij,bjkd->bikgd", weights, v)
        x = x + torch.einsum("bikgd,kgde->bie", mixed, w[".attention.output.matrix"])
        x = x + torch.relu(norm(x) @ w[".mlp.up.matrix"]) ** 2 @ w[".mlp.down.matrix"]
    return norm(x) @ p[".head"][: config.vocab_size].T


@pytest.mark.slow
def test_gradients_are_those_of_the_reference():
    """Of every parameter, to 1e-4 of its largest, with logits weighted at random."""
    import torch

    model, rows = small.model(**RECIPE), small.tokens()
    weights = np.random.default_rng(1).normal(size=(*rows.shape, 61))

    def weighted(model):
        logits = model.logits(small.named(rows), forward=Forward(remat="matmuls"))
        return jnp.sum(logits.array * weights.astype(np.float32)), logits.array

    (_, logits), found = small.run(lambda m: jax.value_and_grad(weighted, has_aux=True)(m), model)
    tensors = {
        path.partition("[")[0]: torch.tensor(np.asarray(x, np.float64), requires_grad=True)
        for path, x in small.leaves(model).items()
    }
    wanted = theirs(tensors, torch.tensor(rows, dtype=torch.int64), model.config)
    assert small.relative(logits, wanted.detach().numpy()) < 1e-4
    (wanted * torch.tensor(weights)).sum().backward()
    assert {".value_embedding", ".value_gate", ".blocks.stacked.input_scale"} < tensors.keys()
    for path, gradient in small.leaves(found).items():
        want = tensors[path.partition("[")[0]].grad.numpy()
        assert abs(want).max() > 1e-3
        assert small.relative(gradient, want) < 1e-4, path


def squares(remat, unroll=1):
    rows, forward = small.named(small.tokens()), Forward(remat=remat, unroll=unroll)
    return lambda model: hax.sum(hax.square(model.hidden(rows, forward=forward))).array


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "unroll"), [("matmuls", 2), ("offload", 1)])
def test_what_is_kept_changes_no_gradient(remat, unroll):
    """Nor does unrolling."""
    if remat == "offload":
        remat = "offload:block_input"
        if "pinned_host" not in {m.kind for m in jax.devices()[0].addressable_memories()}:
            pytest.skip("this backend has no pinned_host memory")
    model = small.model(**RECIPE)
    want = small.gradient(squares("none"), model)
    assert small.relative(small.gradient(squares(remat, unroll), model), want) < 5e-6


def kept(changes, remat="full") -> int:
    """Bytes that the backward pass needs, parameters included."""
    model = small.model(**changes)
    backward = jax.eval_shape(lambda m: jax.vjp(squares(remat), m)[1], model)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    return (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward)) - 4 * parameters
    )


@pytest.mark.slow
def test_the_first_input_and_rows_are_kept_once():
    """Not once per layer: 24 numbers per token, and 2 heads of 8 for each of three tables."""
    tokens, base = 4 * small.tokens().size, kept(PLAIN)
    assert kept({**PLAIN, "input_scale": (0.2, 0.05)}) - base == tokens * 24
    rows = kept({**PLAIN, "value_embeddings": "alternate"}) - base
    assert rows == tokens * (3 * 2 * 8)


@pytest.mark.slow
def test_first_values():
    """nanochat's: uniform tables and gates, factors linear in the layer, MLP and head scaled."""
    wide = {"embed": 256, "heads": 8, "kv_heads": 4, "head_size": 32, "mlp": 512, "layers": 4}
    changes = {**RECIPE, **wide, "mlp_init_scale": 0.4, "head_std": 0.001}
    model = small.init(small.config(**changes))
    stacked, table, gate = model.blocks.stacked, model.value_embedding, model.value_gate
    for layer in range(4):
        share = layer / 3
        assert float(stacked.residual_scale.array[layer]) == pytest.approx(1.15 - 0.10 * share)
        assert float(stacked.input_scale.array[layer]) == pytest.approx(0.20 - 0.15 * share)
    assert float(table.array.std()) == pytest.approx(256**-0.5, rel=0.02)
    assert float(abs(table.array).max()) <= math.sqrt(3 / 256)
    assert 0.0 <= float(gate.array.min()) < 0.001
    assert 0.019 < float(gate.array.max()) <= 0.02
    cut = 0.9866  # standard deviation of a unit normal cut at three
    assert float(stacked.mlp.up.matrix.array.std()) == pytest.approx(0.4 * cut / 16, rel=0.02)
    assert float(model.head.array.std()) == pytest.approx(0.001 * cut, rel=0.02)


@pytest.mark.slow
def test_other_first_values_stay():
    """The same bits as without: each new array has a random key of its own."""
    with_all, without = (small.leaves(small.init(small.config(**c))) for c in (RECIPE, PLAIN))
    assert len(with_all) - len(without) == 4
    for path, array in without.items():
        np.testing.assert_array_equal(with_all[path], array)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_key_scale", 1.2),
        ("residual_scale", (1.15, 1.05)),
        ("input_scale", (0.2, 0.05)),
        ("value_embeddings", "alternate"),
    ],
)
@pytest.mark.parametrize("embedding_norm", [False, True])
def test_no_architecture_has_it(name, value, embedding_norm):
    """Refused by name, for Qwen3 as for NanoChat; fields of first values prevent nothing."""
    like = {"mlp_kind": "relu2", "norm": "plain_rms", "tied": False} if embedding_norm else {}
    shape = dataclasses.replace(tiny, embedding_norm=embedding_norm, mlp_init_scale=0.4, **like)
    nearest = "NanoChat" if embedding_norm else "Qwen3"
    assert describe(shape) == f"exports to Hugging Face as {nearest}ForCausalLM"
    refused = describe(dataclasses.replace(shape, **{name: value}))
    assert refused.startswith("does not export to Hugging Face")
    assert f"{nearest}ForCausalLM but for {name}={value!r}" in refused


def test_large_scores_are_shifted():
    """Beyond 60, in units of a score between normalized queries and keys: sqrt(64) scale^2."""
    shape = dataclasses.replace(tiny, head_size=64)
    assert dataclasses.replace(shape, query_key_scale=math.sqrt(60 / 8) - 1e-6).small_scores
    assert not dataclasses.replace(shape, query_key_scale=math.sqrt(60 / 8) + 1e-6).small_scores
    assert not dataclasses.replace(shape, qk_norm=False).small_scores


def test_the_estimate_has_what_layers_share():
    """24 numbers per token, and 2 heads of 8 of three tables, by tensor 2; with cotangents and
    a copy of each four times."""
    train = TrainConfig(
        batch_size=4, sequence_length=32, remat="full", loss_chunks=32,
        parallel=Parallelism(sharding="replicated", tensor=2),
    )  # fmt: skip
    plain, all_of_it = (
        estimate(small.config(**changes), OptimizerConfig(), train, 2)
        for changes in (PLAIN, RECIPE)
    )
    more = sum(all_of_it.residuals.values()) - sum(plain.residuals.values())
    assert more == 2 * 4 * 32 * (24 + 3 * 2 * 8 / 2)
    assert sum(all_of_it.backward.values()) - sum(plain.backward.values()) == 3 * more
    tables = 64 * 3 * 2 * 8  # padded to 64 ids
    name = "compute parameters of embedding and head"
    assert all_of_it.state[name] - plain.state[name] == 2 * tables / 2
