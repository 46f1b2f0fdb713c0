"""config.json of a shape, one function per architecture.

All keys are written, because defaults differ between architectures and versions of `transformers`.
"""

from __future__ import annotations

from typing import Any

from models.hf import rope
from models.shape.config import TransformerConfig


def rotary(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """The keys of Llama and of the architectures with its key names."""
    return {
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.biases,
        "attention_dropout": 0.0,
        **rope.write(config),
    }


def llama(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """LlamaConfig."""
    return {**rotary(config, positions), "mlp_bias": config.biases}


def mistral(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """MistralConfig; every layer has the window."""
    written = rotary(config, positions)
    del written["attention_bias"]
    return {**written, "sliding_window": config.window}


def qwen(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """Qwen3Config."""
    windows = config.windows
    sliding = {
        "use_sliding_window": any(windows),
        "sliding_window": config.window if any(windows) else None,
        "max_window_layers": config.layers,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
    return {**rotary(config, positions), **sliding}


def qwen2(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """Qwen2Config, which has no setting for biases."""
    written = qwen(config, positions)
    del written["attention_bias"]
    return written


def nanochat(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """NanoChatConfig."""
    changed = {"hidden_act": "relu2", "final_logit_softcapping": config.logit_soft_cap}
    return {**rotary(config, positions), **changed}


def gpt2(config: TransformerConfig, positions: int) -> dict[str, Any]:
    """GPT2Config; its longest sequence is that of the learned positions."""
    del positions
    return {
        "n_positions": config.context,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
