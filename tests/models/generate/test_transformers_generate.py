"""Greedy completions against `transformers`, which has a cache of its own, on the same weights."""

from __future__ import annotations

import pytest

from models.config import TransformerConfig
from models.generate.generate import generate
from tests.models.test_transformers import LLAMA, NEEDS_ORACLE, SCALING, llama

pytestmark = [pytest.mark.slow, NEEDS_ORACLE]

PROMPTS = [[5, 17, 3, 88], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
NEW = 24


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_scaling": SCALING, "biases": True}),
        ("qwen3", {"qk_norm": True, "window_pattern": "SSSL", "window": 5, "layers": 4}),
    ],
    ids=["llama", "qwen3"],
)
def test_llama_and_qwen3(kind, changes):
    """Token for token; their prompts one by one, ours together."""
    from tests.models import transformers_weights as weights

    config = TransformerConfig(**(LLAMA | changes))
    model = llama(config, kind)
    made = weights.ours(config, weights.from_llama(config, weights.numpy_state(model.state_dict())))
    assert generate(made, PROMPTS, new_tokens=NEW) == theirs(model)


def test_gpt2():
    """Learned positions."""
    import transformers

    from tests.models import transformers_weights as weights

    shape = {"vocab_size": 97, "layers": 3, "embed": 48, "heads": 6, "kv_heads": 6, "head_size": 8}
    config = TransformerConfig(
        **shape,
        mlp=192,
        mlp_kind="gelu",
        norm="layer",
        biases=True,
        positions="learned",
        context=64,
        qk_norm=False,
        norm_epsilon=1e-5,
    )
    made = transformers.GPT2Config(
        vocab_size=97,
        n_layer=3,
        n_embd=48,
        n_head=6,
        n_positions=64,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = weights.randomized(transformers.GPT2LMHeadModel(made))
    ours = weights.ours(config, weights.from_gpt2(config, weights.numpy_state(model.state_dict())))
    assert generate(ours, PROMPTS, new_tokens=NEW) == theirs(model)


def theirs(model) -> list[list[int]]:
    import torch

    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(out[0, len(prompt) :].tolist())
    return found
