"""Models of `transformers` with random weights, and the same weights as a `Transformer` of ours.

The state dicts are read by the names that `transformers` gives them; matrices of its Linear are
[out, in], those of GPT-2's Conv1D are [in, out] with queries, keys and values side by side.
"""

from __future__ import annotations

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import torch

from models.config import TransformerConfig
from models.transformer import Transformer

HEADS = ("kv_heads", "q_per_kv", "head_size")


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """`model` in float32 with random matrices and biases, norm weights about one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(normal * 0.25)
            elif name.endswith("bias"):
                parameter.copy_(normal * 0.3)
            else:
                parameter.copy_(1.0 + 0.3 * normal)
    return model.float().eval()


def ours(config: TransformerConfig, arrays: dict[str, np.ndarray]) -> Transformer:
    """A Transformer of `arrays` by our path, such as "blocks.attention.query.matrix" [layers, ...].

    Every parameter must be given in its own shape up to merged axes, and nothing else.
    """
    shapes = jax.eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    rest = dict(arrays)

    def fill(path, leaf: hax.NamedArray) -> hax.NamedArray:
        name = ".".join(key.name for key in path if key.name != "stacked")
        array = np.asarray(rest.pop(name), np.float32)
        return hax.named(jnp.asarray(array.reshape(leaf.array.shape)), leaf.axes)

    made = jax.tree.map_with_path(fill, shapes, is_leaf=lambda x: isinstance(x, hax.NamedArray))
    assert not rest, f"nothing takes {sorted(rest)}"
    return made


def _stack(state: dict[str, np.ndarray], layers: int, name: str) -> list[np.ndarray]:
    return [state[name.format(i)] for i in range(layers)]


def _llama_names(config: TransformerConfig) -> dict[str, str]:
    """Names in LlamaForCausalLM or Qwen3ForCausalLM by our path, of what a layer has."""
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "attention.query.matrix": "self_attn.q_proj.weight",
        "attention.key.matrix": "self_attn.k_proj.weight",
        "attention.value.matrix": "self_attn.v_proj.weight",
        "attention.output.matrix": "self_attn.o_proj.weight",
        "mlp.gate.matrix": "mlp.gate_proj.weight",
        "mlp.up.matrix": "mlp.up_proj.weight",
        "mlp.down.matrix": "mlp.down_proj.weight",
    }
    if config.biases:
        names |= {
            path.replace("matrix", "bias"): name.replace("weight", "bias")
            for path, name in names.items()
            if path.endswith("matrix")
        }
    if config.qk_norm:
        names["attention.query_norm.weight"] = "self_attn.q_norm.weight"
        names["attention.key_norm.weight"] = "self_attn.k_norm.weight"
    return names


def from_llama(config: TransformerConfig, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays for `ours` of a LlamaForCausalLM or Qwen3ForCausalLM state dict."""
    arrays = {
        "embedding": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
    }
    if not config.tied:
        arrays["head"] = state["lm_head.weight"]
    for path, name in _llama_names(config).items():
        layers = _stack(state, config.layers, "model.layers.{}." + name)
        arrays[f"blocks.{path}"] = np.stack([x.T if x.ndim == 2 else x for x in layers])
    return arrays


def fill_llama(theirs: torch.nn.Module, model: Transformer) -> None:
    """Give a LlamaForCausalLM or Qwen3ForCausalLM the parameters of `model`."""
    found = {
        ".".join(key.name for key in path if key.name != "stacked"): np.asarray(leaf.array)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            model, is_leaf=lambda x: isinstance(x, hax.NamedArray)
        )
    }
    wanted = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm.weight"}
    wanted |= {} if model.config.tied else {"lm_head.weight": "head"}
    arrays = {name: found[path] for name, path in wanted.items()}
    for path, name in _llama_names(model.config).items():
        for layer, array in enumerate(found[f"blocks.{path}"]):
            arrays[f"model.layers.{layer}.{name}"] = array
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            array = arrays.pop(name)
            if parameter.ndim == 2 and name not in wanted:  # theirs is [out, in]
                array = array.reshape(parameter.shape[1], parameter.shape[0]).T
            parameter.copy_(torch.from_numpy(np.array(array)))
    assert not arrays, f"nothing takes {sorted(arrays)}"


def from_gpt2(config: TransformerConfig, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays for `ours` of a GPT2LMHeadModel state dict."""
    names = {
        "attention_norm": "ln_1",
        "mlp_norm": "ln_2",
        "attention.output": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    arrays = {
        "embedding": state["transformer.wte.weight"],
        "position_embedding": state["transformer.wpe.weight"],
        "final_norm.weight": state["transformer.ln_f.weight"],
        "final_norm.bias": state["transformer.ln_f.bias"],
    }

    def stacked(name: str) -> np.ndarray:
        return np.stack(_stack(state, config.layers, "transformer.h.{}." + name))

    for path, name in names.items():
        weight = "weight" if path.endswith("norm") else "matrix"
        arrays[f"blocks.{path}.{weight}"] = stacked(f"{name}.weight")
        arrays[f"blocks.{path}.bias"] = stacked(f"{name}.bias")
    matrices = np.split(stacked("attn.c_attn.weight"), 3, axis=2)
    biases = np.split(stacked("attn.c_attn.bias"), 3, axis=1)
    for name, matrix, bias in zip(("query", "key", "value"), matrices, biases, strict=True):
        arrays[f"blocks.attention.{name}.matrix"] = matrix
        arrays[f"blocks.attention.{name}.bias"] = bias
    return arrays


def numpy_state(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays of a state dict, or of its gradients."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
