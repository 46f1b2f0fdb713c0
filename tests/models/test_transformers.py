"""Gradients and rotary frequencies against `transformers` on the CPU; logits are in `hf`."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import numpy as np
import pytest

import models.named as hax
from models.layers.block import rotary_angles
from models.loss.next_token import next_token_loss
from models.shape.config import YarnScaling
from models.transformer import Forward
from tests.models import small
from tests.models.hf.shapes import SHAPES

NEEDS_ORACLE = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")),
    reason="the optional extra oracle (PyTorch with transformers) is not installed",
)
pytestmark = [pytest.mark.slow, NEEDS_ORACLE]


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("base", [500.0, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_frequencies(base, factor):
    """Frequencies of every pair of a head of 128, and the attention factor."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = YarnScaling(factor=factor, original_context=4096)
    shape = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2}
    rope = {
        "rope_theta": base,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
    }
    theirs = transformers.LlamaConfig(**shape, rope_parameters=rope, max_position_embeddings=65536)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    one = hax.named(np.ones(1, np.int32), "position")
    angles = jax.jit(lambda p: rotary_angles(p, hax.Axis("head_size", 128), base, yarn))(one)
    np.testing.assert_allclose(angles.array[:, 0], frequencies.numpy(), rtol=1e-6)
    assert yarn.attention_factor == pytest.approx(attention_factor)


def test_gradients_of_the_mean_loss():
    """PyTorch's backward pass of its own loss gives our gradients, parameter by parameter."""
    import torch

    from tests.models import transformers_weights as weights

    config = SHAPES["Qwen3"]
    model = weights.random_model(config, 512)
    made = weights.ours(config, weights.numpy_state(model.state_dict()))
    tokens = small.tokens(2, 24, config.vocab_size)
    ids = torch.tensor(tokens, dtype=torch.long)
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    want = weights.ours(config, weights.numpy_state(gradients))

    def mean(model):
        sums = next_token_loss(
            model, small.named(tokens), chunks=3, forward=Forward(remat="matmuls")
        )
        return sums.objective / sums.count

    np.testing.assert_allclose(small.run(mean, made), loss.item(), rtol=1e-5)
    got = small.gradient(mean, made)
    assert len(jax.tree.leaves(want)) == 13
    assert small.relative(got, want) < 1e-4
