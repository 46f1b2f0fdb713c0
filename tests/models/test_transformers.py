"""Whole models against `transformers` on the CPU: the same random weights, the same numbers."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import haliax as hax
import jax
import numpy as np
import pytest

from models.config import RopeScaling, TransformerConfig, YarnScaling
from models.loss.next_token import next_token_loss
from models.rotary import rotary_angles
from tests.models import small

NEEDS_ORACLE = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")),
    reason="the optional extra oracle (PyTorch with transformers) is not installed",
)
pytestmark = [pytest.mark.slow, NEEDS_ORACLE]

VOCAB = 97
LLAMA = {
    "vocab_size": VOCAB,
    "layers": 3,
    "embed": 48,
    "heads": 6,
    "kv_heads": 2,
    "head_size": 8,
    "mlp": 80,
    "qk_norm": False,
    "norm_epsilon": 1e-5,
    "rope_base": 500.0,
}
SCALING = RopeScaling(
    factor=4.0, low_frequency_factor=1.0, high_frequency_factor=6.0, original_context=120
)
YARN = YarnScaling(factor=4.0, original_context=200, beta_fast=8.0)
"""At base 500, a head of 8 has one pair kept, one blended and two slowed."""
LLAMAS = {
    "grouped_untied": {"tied": False},
    "rope_scaling": {"rope_scaling": SCALING},
    "yarn": {"rope_scaling": YARN},
    "biases": {"biases": True},
}
QWENS = {
    "qk_norm": {},
    "yarn_temperature": {"rope_scaling": dataclasses.replace(YARN, temperature=1.3)},
    "windows": {"window_pattern": "SSSL", "window": 5, "layers": 4},
}


def scaled(scaling: RopeScaling | YarnScaling) -> dict[str, object]:
    """The same in the terms of `transformers`."""
    common = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    if isinstance(scaling, YarnScaling):
        betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        given = {"attention_factor": scaling.temperature} if scaling.temperature else {}
        return {"rope_type": "yarn", **common, **betas, **given}
    return {
        "rope_type": "llama3",
        **common,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
    }


def llama(config: TransformerConfig, kind: str):
    """A random LlamaForCausalLM or Qwen3ForCausalLM of the same shape."""
    import transformers

    from tests.models.transformers_weights import randomized

    rope = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling is not None:
        rope |= scaled(config.rope_scaling)
    shape = {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "rope_parameters": rope,
        "attention_bias": config.biases,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
        "pad_token_id": None,
    }
    if kind == "llama":
        made = transformers.LlamaConfig(**shape, mlp_bias=config.biases)
        return randomized(transformers.LlamaForCausalLM(made))
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    made = transformers.Qwen3Config(
        **shape,
        layer_types=kinds,
        sliding_window=config.window,
        use_sliding_window=config.window is not None,
    )
    return randomized(transformers.Qwen3ForCausalLM(made))


def rows(position: int = 40) -> np.ndarray:
    return small.tokens(2, position, VOCAB)


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def assert_equal_logits(got, want):
    assert abs(want).max() > 1
    assert small.relative(got, want) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", changes) for changes in LLAMAS.values()]
    + [("qwen3", {"qk_norm": True} | changes) for changes in QWENS.values()],
    ids=[*LLAMAS, *QWENS],
)
def test_llama_and_qwen3(kind, changes):
    """Logits in float32 agree to 1e-4 of the largest."""
    from tests.models import transformers_weights as weights

    config = TransformerConfig(**(LLAMA | changes))
    model = llama(config, kind)
    made = weights.ours(config, weights.from_llama(config, weights.numpy_state(model.state_dict())))
    tokens = rows()
    got = small.run(lambda m: m.logits(small.named(tokens)).array, made)
    assert_equal_logits(got, theirs(model, tokens))


@pytest.mark.parametrize("base", [500.0, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_frequencies(base, factor):
    """Frequencies of every pair of a head of 128, and the attention factor."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = YarnScaling(factor=factor, original_context=4096)
    shape = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2}
    rope = {"rope_theta": base, **scaled(yarn)}
    theirs = transformers.LlamaConfig(**shape, rope_parameters=rope, max_position_embeddings=65536)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    one = hax.named(np.ones(1, np.int32), "position")
    angles = jax.jit(lambda p: rotary_angles(p, hax.Axis("head_size", 128), base, yarn))(one)
    np.testing.assert_allclose(angles.array[:, 0], frequencies.numpy(), rtol=3e-6)
    assert yarn.attention_factor == pytest.approx(attention_factor)


def test_gpt2():
    """Learned positions, LayerNorm, biases, tanh GELU and a tied head."""
    import transformers

    from tests.models import transformers_weights as weights

    config = TransformerConfig(
        vocab_size=VOCAB,
        layers=3,
        embed=48,
        heads=6,
        kv_heads=6,
        head_size=8,
        mlp=192,
        mlp_kind="gelu",
        norm="layer",
        biases=True,
        positions="learned",
        context=64,
        qk_norm=False,
        norm_epsilon=1e-5,
    )
    shape = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_layer=3,
        n_embd=48,
        n_head=6,
        n_positions=64,
        activation_function="gelu_new",
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = weights.randomized(transformers.GPT2LMHeadModel(shape))
    made = weights.ours(config, weights.from_gpt2(config, weights.numpy_state(model.state_dict())))
    tokens = rows()
    got = small.run(lambda m: m.logits(small.named(tokens)).array, made)
    assert_equal_logits(got, theirs(model, tokens))


def test_gradients_of_the_mean_loss():
    """PyTorch's backward pass of its own loss gives our gradients, parameter by parameter."""
    import torch

    from tests.models import transformers_weights as weights

    config = TransformerConfig(**(LLAMA | {"qk_norm": True}))
    model = llama(config, "qwen3")
    made = weights.ours(config, weights.from_llama(config, weights.numpy_state(model.state_dict())))
    tokens = rows(24)
    ids = torch.tensor(tokens, dtype=torch.long)
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    want = weights.ours(config, weights.from_llama(config, weights.numpy_state(gradients)))

    def mean(model):
        sums = next_token_loss(model, small.named(tokens), chunks=3, remat="products")
        return sums.objective / sums.count

    np.testing.assert_allclose(small.run(mean, made), loss.item(), rtol=1e-5)
    got = small.gradient(mean, made)
    assert len(jax.tree.leaves(want)) == 13
    assert small.relative(got, want) < 1e-4
