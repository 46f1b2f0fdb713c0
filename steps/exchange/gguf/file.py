"""Convert a Hugging Face folder to one GGUF file for llama.cpp and programs built on it.

The folder has a config.json, a tokenizer.json and safetensors, from `export_hf` or `transformers`.
The `gguf` package gives the names of tensors and metadata. One tensor at a time is in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import quant_shape_to_byte_shape, quantize

from models.hf.tensors import Tensor
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
from pipeline.errors import InputError
from steps.exchange.choices import GGUF_DTYPES
from steps.exchange.gguf.vocabulary import Vocabulary, read_vocabulary
from steps.exchange.hf.hf_files import (
    CHAT_TEMPLATE,
    FolderModel,
    read_file,
    read_json,
    read_model,
)

_KNOWN = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "GPT2LMHeadModel": MODEL_ARCH.GPT2,
}
_GENERATION = "generation_config.json"
_F32, _F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
_BLOCK = 32  # numbers that share a scale in q8_0
_LARGEST = {
    _F32: float(np.finfo(np.float32).max),
    _F16: 65_504.0,
    GGMLQuantizationType.BF16: float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
    GGMLQuantizationType.Q8_0: 127 * 65_504.0,  # its scale is a float16
}


def write_gguf(
    folder: str, path: str, dtype: str, name: str, ignore_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Write the model in `folder` as the GGUF file `path`.

    Matrices are stored as `dtype`, vectors and learned positions as float32; a matrix whose rows do
    not divide into the blocks of 32 of q8_0 is stored as float16.

    Returns:
        architecture, pre_tokenizer, composes (see `Vocabulary`), vocab_size, tensors, parameters
    """
    model = read_model(folder, ignore_keys)
    arch, rows = _arch_of(model), model.config.vocab_size
    vocabulary = _vocabulary(folder, rows)
    planned = list(_plan(arch, model, GGMLQuantizationType[dtype.upper()]))
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _describe(writer, model)
    _add_vocabulary(writer, vocabulary)
    _add_chat(writer, folder)
    try:
        _write(writer, planned)
    finally:
        writer.close()
    return {
        "architecture": MODEL_ARCH_NAMES[arch],
        "pre_tokenizer": vocabulary.pre,
        "composes": vocabulary.composes,
        "vocab_size": rows,
        "tensors": len(planned),
        "parameters": sum(math.prod(shape) for _, shape, _, _ in planned),
        "bytes": os.path.getsize(path),
    }


_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
assert set(_FILE_TYPES) == set(GGUF_DTYPES)

_Planned = tuple[str, tuple[int, ...], GGMLQuantizationType, Callable[[], np.ndarray]]
"""Name in GGUF, shape, type and reader of a tensor."""


def _plan(
    arch: MODEL_ARCH, model: FolderModel, matrices: GGMLQuantizationType
) -> Iterator[_Planned]:
    names = get_tensor_name_map(arch, model.config.layers)
    for tensor in model.tensors:
        known = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        assert known is not None, tensor.name
        shape = tensor.shape[::-1] if _transposes(tensor) else tensor.shape
        kind = _F32 if len(shape) < 2 or known.startswith("position_embd") else matrices
        if kind is GGMLQuantizationType.Q8_0 and shape[-1] % _BLOCK:
            kind = _F16
        yield known, shape, kind, partial(_stored, arch, model, tensor)
    if isinstance(model.config.rope_scaling, RopeScaling):
        factors = llama3_factors(model.config)
        yield "rope_freqs.weight", factors.shape, _F32, lambda: factors


def _write(writer: GGUFWriter, planned: Sequence[_Planned]) -> None:
    for name, shape, kind, _ in planned:
        size = math.prod(quant_shape_to_byte_shape(shape, kind))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _, kind, read in planned:
        values = np.ascontiguousarray(read(), np.float32)
        if not (largest := np.abs(values).max(initial=0.0)) <= _LARGEST[kind]:
            if not np.isfinite(largest):
                raise InputError(f"{name}: expected finite values, found {largest}")
            wider = "f32" if kind is GGMLQuantizationType.BF16 else "bf16"
            raise InputError(
                f"{name}: has numbers beyond {kind.name}'s {_LARGEST[kind]:,.6g}; export as {wider}"
            )
        writer.write_tensor_data(quantize(values, kind))


def _describe(writer: GGUFWriter, model: FolderModel) -> None:
    config = model.config
    writer.add_block_count(config.layers)
    writer.add_context_length(model.positions)
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
    if isinstance(yarn := config.rope_scaling, YarnScaling):
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn.factor)
        writer.add_rope_scaling_orig_ctx_len(yarn.original_context)
        writer.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)
        # llama.cpp multiplies the paper's factor by the file's, so that has the ratio of the two.
        paper = 0.1 * math.log(yarn.factor) + 1.0
        writer.add_rope_scaling_attn_factors(yarn.attention_factor / paper)


def _transposes(tensor: Tensor) -> bool:
    """Whether a tensor is stored as [in, out]; llama.cpp stores [out, in]."""
    part = tensor.parts[0]
    return part.layer is not None and len(part.shape) == 2 and not tensor.transposed


def _stored(arch: MODEL_ARCH, model: FolderModel, tensor: Tensor) -> np.ndarray:
    """The values of a tensor as llama.cpp has them."""
    values, config = model.content.read(tensor.name), model.config
    if _transposes(tensor):
        return values.T
    if arch is MODEL_ARCH.LLAMA:
        for part, heads in (("query", config.heads), ("key", config.kv_heads)):
            if f".attention.{part}." in tensor.parts[0].path:
                return interleaved(values, heads)
    return values


def _arch_of(model: FolderModel) -> MODEL_ARCH:
    """llama.cpp's architecture that computes a model.

    A shape that llama.cpp's code does not support is refused: a file that loads and computes
    something else is the worst outcome.
    """
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
    if isinstance(config.rope_scaling, RopeScaling) and name != "LlamaForCausalLM":
        raise InputError(
            f"config.json: rope_type 'llama3'; llama.cpp's {name} reads no such factors; models "
            "without qk_norm are exported as Llama, which has them"
        )
    return _KNOWN[name]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_size, ...] of queries or keys in the order of llama.cpp's "llama".

    Its rotary embedding rotates the pairs of features (0, 1), (2, 3), ...; `transformers` rotates
    the pairs (i, i + head_size / 2). So row i of a head moves to 2 i, and i + head_size / 2 to
    2 i + 1.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(config: TransformerConfig) -> np.ndarray:
    """float32 [head_size / 2]: the divisors of rotary frequencies in Llama 3's scaling."""
    from models.layers.block import frequencies  # imports JAX, which nothing else here needs

    size, base = config.head_size, config.rope_base
    divisors = frequencies(size, base) / frequencies(size, base, config.rope_scaling)
    return divisors.astype(np.float32)


def _vocabulary(folder: str, rows: int) -> Vocabulary:
    named = read_json(folder, "config.json")
    if os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        named |= read_json(folder, "tokenizer_config.json")
    return read_vocabulary(read_file(folder, "tokenizer.json"), named, rows)


def _add_chat(writer: GGUFWriter, folder: str) -> None:
    """The chat template, with the end of a turn: the second EOS of generation_config.json."""
    if not os.path.exists(os.path.join(folder, CHAT_TEMPLATE)):
        return
    writer.add_chat_template(read_file(folder, CHAT_TEMPLATE).decode())
    if os.path.exists(os.path.join(folder, _GENERATION)):
        ends = read_json(folder, _GENERATION).get("eos_token_id")
        if isinstance(ends, list) and len(ends) > 1:
            writer.add_eot_token_id(ends[1])


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name of byte-level BPE
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.pad is not None:
        writer.add_pad_token_id(vocabulary.pad)
    writer.add_add_bos_token(vocabulary.add_bos)
