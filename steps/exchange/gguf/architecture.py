"""The llama.cpp architecture that computes the same model as a class of `transformers`.

An `Architecture` has the names of a model's tensors, and writes its hyperparameters to a GGUF file.
A shape that llama.cpp's code for the architecture does not support is refused: a file that loads
and computes something else is the worst outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType

from models.hf.tensors import Tensor
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
from pipeline.errors import InputError
from steps.exchange.hf.hf_files import FolderModel

_KNOWN = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "GPT2LMHeadModel": MODEL_ARCH.GPT2,
}


@dataclass(frozen=True)
class Architecture:
    """The correspondence of a model in `transformers` and in llama.cpp.

    Attributes:
        arch: llama.cpp's architecture.
        model: the model in its folder.
        made: tensors that the safetensors files lack, by their name in GGUF.
    """

    arch: MODEL_ARCH
    model: FolderModel
    made: Mapping[str, np.ndarray] = field(default_factory=dict)

    def describe(self, writer: GGUFWriter) -> None:
        """Write the hyperparameters to a file."""
        config = self.model.config
        writer.add_block_count(config.layers)
        writer.add_context_length(self.model.positions)
        writer.add_embedding_length(config.embed)
        writer.add_feed_forward_length(config.mlp)
        writer.add_head_count(config.heads)
        if config.positions == "learned":
            writer.add_layer_norm_eps(config.norm_epsilon)
            return
        writer.add_vocab_size(config.vocab_size)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
        writer.add_layer_norm_rms_eps(config.norm_epsilon)
        writer.add_rope_dimension_count(config.head_size)
        writer.add_rope_freq_base(config.rope_base)
        if isinstance(config.rope_scaling, YarnScaling):
            _describe_yarn(writer, config.rope_scaling)

    def transposes(self, tensor: Tensor) -> bool:
        """Whether a tensor is stored as [in, out]; llama.cpp stores [out, in]."""
        part = tensor.parts[0]
        return part.layer is not None and len(part.shape) == 2 and not tensor.transposed

    def stored(self, tensor: Tensor) -> np.ndarray:
        """The values of a tensor as llama.cpp has them."""
        values, config = self.model.content.read(tensor.name), self.model.config
        if self.transposes(tensor):
            return values.T
        if self.arch is MODEL_ARCH.LLAMA:
            for part, heads in (("query", config.heads), ("key", config.kv_heads)):
                if f".attention.{part}." in tensor.parts[0].path:
                    return interleaved(values, heads)
        return values


def architecture(model: FolderModel) -> Architecture:
    """The architecture of a model."""
    name, config = model.architecture.name, model.config
    if name not in _KNOWN:
        raise InputError(
            f"config.json: architecture {name} has no counterpart in llama.cpp that is known "
            f"here; known are {', '.join(_KNOWN)}"
        )
    if any(config.windows):
        raise InputError(
            f"config.json: layer_types or sliding_window: layers of a window of {config.window}; "
            f"llama.cpp's {name} attends to the whole sequence in every layer, so the file would "
            "compute something else"
        )
    if not isinstance(config.rope_scaling, RopeScaling):
        return Architecture(_KNOWN[name], model)
    if name != "LlamaForCausalLM":
        raise InputError(
            f"config.json: rope_type 'llama3'; llama.cpp's {name} reads no such factors; models "
            "without qk_norm are exported as Llama, which has them"
        )
    made = {"rope_freqs.weight": _llama3_factors(config)}
    return Architecture(_KNOWN[name], model, made)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_size, ...] of queries or keys in the order of llama.cpp's "llama".

    Its rotary embedding rotates the pairs of features (0, 1), (2, 3), ...; `transformers` rotates
    the pairs (i, i + head_size / 2). So row i of a head moves to 2 i, and i + head_size / 2 to
    2 i + 1.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _describe_yarn(writer: GGUFWriter, yarn: YarnScaling) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(yarn.factor)
    writer.add_rope_scaling_orig_ctx_len(yarn.original_context)
    writer.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)
    # llama.cpp multiplies the paper's factor by the file's, so the file has the ratio of the two.
    paper = 0.1 * math.log(yarn.factor) + 1.0
    writer.add_rope_scaling_attn_factors(yarn.attention_factor / paper)


def _llama3_factors(config: TransformerConfig) -> np.ndarray:
    """float32 [head_size / 2]: the divisors of rotary frequencies in Llama 3's scaling."""
    from models.layers.block import frequencies  # imports JAX, which nothing else here needs

    size, base = config.head_size, config.rope_base
    divisors = frequencies(size, base) / frequencies(size, base, config.rope_scaling)
    return divisors.astype(np.float32)
