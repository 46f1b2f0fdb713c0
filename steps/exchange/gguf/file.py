"""Convert a Hugging Face folder to one GGUF file for llama.cpp and programs built on it.

The folder has a config.json, a tokenizer.json and safetensors, from `export_hf` or `transformers`.
The `gguf` package gives the names of tensors and metadata. One tensor at a time is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.quants import quant_shape_to_byte_shape, quantize

from pipeline.errors import InputError
from steps.exchange.choices import GGUF_DTYPES
from steps.exchange.gguf.architecture import Architecture, architecture
from steps.exchange.gguf.vocabulary import Vocabulary, read_vocabulary
from steps.exchange.hf.hf_files import read_file, read_json, read_model

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
    source = read_model(folder, ignore_keys)
    model = architecture(source)
    rows = source.config.vocab_size
    vocabulary = _vocabulary(folder, rows)
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[model.arch])
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    model.describe(writer)
    _add_vocabulary(writer, vocabulary)
    try:
        parameters = _write(writer, _plan(model, GGMLQuantizationType[dtype.upper()]))
    finally:
        writer.close()
    return {
        "architecture": MODEL_ARCH_NAMES[model.arch],
        "pre_tokenizer": vocabulary.pre,
        "composes": vocabulary.composes,
        "vocab_size": rows,
        "tensors": len(source.tensors) + len(model.made),
        "parameters": parameters,
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


def _plan(model: Architecture, matrices: GGMLQuantizationType) -> Iterator[_Planned]:
    names = get_tensor_name_map(model.arch, model.model.config.layers)
    for tensor in model.model.tensors:
        known = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        assert known is not None, tensor.name
        shape = tensor.shape[::-1] if model.transposes(tensor) else tensor.shape
        kind = _F32 if len(shape) < 2 or known.startswith("position_embd") else matrices
        if kind is GGMLQuantizationType.Q8_0 and shape[-1] % _BLOCK:
            kind = _F16
        yield known, shape, kind, lambda tensor=tensor: model.stored(tensor)
    for known, values in model.made.items():
        yield known, values.shape, _F32, lambda values=values: values


def _write(writer: GGUFWriter, planned: Iterator[_Planned]) -> int:
    """Write the whole file in one pass; returns the number of values of all tensors."""
    reads, count = [], 0
    for name, shape, kind, read in planned:
        size = int(np.prod(quant_shape_to_byte_shape(shape, kind)))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        reads.append((name, kind, read))
        count += int(np.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind, read in reads:
        values = np.ascontiguousarray(read(), np.float32)
        if not (largest := np.abs(values).max(initial=0.0)) <= _LARGEST[kind]:
            if not np.isfinite(largest):
                raise InputError(f"{name}: expected finite values, found {largest}")
            wider = "f32" if kind is GGMLQuantizationType.BF16 else "bf16"
            raise InputError(
                f"{name}: has numbers beyond {kind.name}'s {_LARGEST[kind]:,.6g}; export as {wider}"
            )
        writer.write_tensor_data(quantize(values, kind))
    return count


def _vocabulary(folder: str, rows: int) -> Vocabulary:
    named = read_json(folder, "config.json")
    if os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        named |= read_json(folder, "tokenizer_config.json")
    return read_vocabulary(read_file(folder, "tokenizer.json"), named, rows)


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
