"""Write a trained model as a folder for `transformers` and compatible programs.

One process streams the checkpoint's chunks into safetensors tensor by tensor, so the export needs
neither accelerators nor memory for the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.tokenizer.text_tokenizer import TextTokenizer
from models.hf.architectures import Architecture, architecture_of, to_json
from models.hf.tensors import Tensor
from models.shape.config import TransformerConfig
from pipeline.store import storage
from steps.exchange.choices import check_choices
from steps.exchange.hf.hf_files import INDEX
from steps.exchange.hf.safetensors_writer import DTYPES, plan_shards, write_shard
from steps.exchange.hf.tokenizer_files import check_auto_tokenizer, write_tokenizer_files
from training.checkpoint.restore import StoredModel

SHARD_BYTES = 5_000_000_000
_PIECE_BYTES = 64 << 20
_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}  # as `ponente generate`


@dataclass(frozen=True, kw_only=True)
class Export:
    """The model to export, and its format.

    Attributes:
        checkpoint: URL of a checkpoint's directory.
        config: shape of its model.
        positions: tokens of a sequence in training.
        tokenizer: tokenizer of training; None for a folder without one.
        dtype: "bfloat16" or "float32".
        parameters: "ema" for their moving average (EMA), if the run kept one, or "last".
        shard_bytes: most bytes of a safetensors file.
        auto_tokenizer: refuse a tokenizer of which `AutoTokenizer` makes another.
    """

    checkpoint: str
    config: TransformerConfig
    positions: int
    tokenizer: TextTokenizer | None
    dtype: str = "bfloat16"
    parameters: str = "ema"
    shard_bytes: int = SHARD_BYTES
    auto_tokenizer: bool = True


def write_hf_folder(folder: str, export: Export) -> dict[str, Any]:
    """Write config.json, generation_config.json, safetensors and the tokenizer's files.

    Returns:
        architecture, dtype, parameters ("ema" or "last"), files, bytes and tensors.
    """
    config = export.config
    check_choices("export", export.dtype, export.parameters)
    architecture = architecture_of(config)
    if export.tokenizer is not None and export.auto_tokenizer:
        check_auto_tokenizer(export.tokenizer, architecture)
    stored = StoredModel(export.checkpoint, config, ema=export.parameters == "ema")
    tensors = list(architecture.tensors(config))
    itemsize = np.dtype(DTYPES[export.dtype][1]).itemsize
    shards = plan_shards(tensors, itemsize, export.shard_bytes)
    total = sum(
        write_shard(
            storage.join(folder, shard.file),
            shard.tensors,
            export.dtype,
            lambda tensor: _pieces(stored, tensor),
        )
        for shard in shards
    )
    if len(shards) > 1:
        weights = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
        _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
    _write_configs(folder, architecture, export)
    if export.tokenizer is not None:
        write_tokenizer_files(export.tokenizer, folder, config.vocab_size, export.positions)
    return {
        "architecture": architecture.name,
        "dtype": export.dtype,
        "parameters": "ema" if stored.is_ema else "last",
        "files": [shard.file for shard in shards],
        "bytes": total,
        "tensors": len(tensors),
    }


def _write_configs(folder: str, architecture: Architecture, export: Export) -> None:
    bos, eos = None, None
    if export.tokenizer is not None:
        bos, eos = export.tokenizer.bos_id, export.tokenizer.eos_id
    special = {"bos_token_id": bos, "eos_token_id": eos}
    content = {
        **to_json(export.config, export.positions),
        **special,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": export.dtype,
        "torch_dtype": export.dtype,  # the name of "dtype" before transformers 5
        # Without it, AutoTokenizer advises another split for Mistral models of over 100,000 ids.
        "transformers_version": "5.0.0",
    }
    _write_json(folder, "config.json", content)
    longest = export.config.context or export.positions
    generation = {**special, "pad_token_id": eos, **_SAMPLING, "max_length": longest}
    _write_json(folder, "generation_config.json", generation)


def _pieces(stored: StoredModel, tensor: Tensor) -> Iterator[np.ndarray]:
    """Values of a tensor in row-major order; a table comes in pieces of `_PIECE_BYTES`."""
    first = tensor.parts[0]
    if first.layer is None and len(first.shape) == 2:
        rows, width = first.shape
        step = max(1, _PIECE_BYTES // (4 * width))
        for begin in range(0, rows, step):
            yield stored.read(first.path, (begin, min(begin + step, rows)))
        return
    parts = [
        stored.read(part.path, None if part.layer is None else (part.layer, part.layer + 1))
        for part in tensor.parts
    ]
    yield tensor.join(parts)


def _write_json(folder: str, name: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    storage.write_atomic(storage.join(folder, name), text.encode())
