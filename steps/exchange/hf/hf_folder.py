"""Write a trained model as a folder for `transformers` and compatible programs.

The checkpoint's chunks are streamed into safetensors tensor by tensor, so the export needs neither
accelerators nor memory for the whole model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from data.tokenizer.text_tokenizer import TextTokenizer
from models.hf.architectures import architecture_of, to_json
from models.hf.tensors import Tensor
from models.shape.config import TransformerConfig
from pipeline.errors import InputError
from pipeline.store import storage
from steps.exchange.choices import check_choices
from steps.exchange.hf.hf_files import INDEX, SINGLE
from steps.exchange.hf.tokenizer_files import check_auto_tokenizer, write_tokenizer_files
from steps.tokens.chat_templates import Chat
from training.checkpoint.restore import StoredModel

DTYPES: dict[str, tuple[str, Any]] = {
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float32": ("F32", np.float32),
}
"""The name in a file and the NumPy dtype, by the dtype of the export."""

_ALIGNED = 8
SHARD_BYTES = 5_000_000_000
_PIECE_BYTES = 64 << 20
_SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}  # as `ponente generate`


@dataclass(frozen=True, kw_only=True)
class Export:
    """The model to export, and its format; the last four are arguments of `export_hf`."""

    checkpoint: str
    config: TransformerConfig
    positions: int  # tokens of a sequence in training
    tokenizer: TextTokenizer | None
    chat: Chat | None = None  # that of training; None for a model of documents
    dtype: str = "bfloat16"
    parameters: str = "ema"
    shard_bytes: int = SHARD_BYTES
    auto_tokenizer: bool = True


def write_hf_folder(folder: str, export: Export) -> dict[str, Any]:
    """Write config.json, generation_config.json, safetensors and the tokenizer's files."""
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
        write_shard(storage.join(folder, file), of_file, export.dtype, partial(_pieces, stored))
        for file, of_file in shards
    )
    if len(shards) > 1:
        weights = {tensor.name: file for file, of_file in shards for tensor in of_file}
        _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
    write_configs(folder, export)
    if export.tokenizer is not None:
        template = export.chat.template if export.chat else None
        write_tokenizer_files(
            export.tokenizer, folder, config.vocab_size, export.positions, template
        )
    return {
        "architecture": architecture.name,
        "dtype": export.dtype,
        "parameters": "ema" if stored.is_ema else "last",
        "files": [file for file, _ in shards],
        "bytes": total,
        "tensors": len(tensors),
    }


def plan_shards(
    tensors: Iterable[Tensor], itemsize: int, most: int
) -> list[tuple[str, list[Tensor]]]:
    """Name and tensors of files of at most `most` bytes; a larger tensor gets its own file."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        more = math.prod(tensor.shape) * itemsize
        if groups[-1] and size + more > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += more
    if len(groups) == 1:
        return [(SINGLE, groups[0])]
    end = f"of-{len(groups):05d}.safetensors"
    return [(f"model-{number:05d}-{end}", group) for number, group in enumerate(groups, 1)]


def write_shard(
    url: str,
    tensors: Sequence[Tensor],
    dtype: str,
    pieces: Callable[[Tensor], Iterable[np.ndarray]],
) -> int:
    """Write one safetensors file; returns the number of bytes of its tensors.

    It is the length of a header (8 bytes, little-endian), the header (JSON of dtype, shape and
    offsets of every tensor), and the tensors' bytes (https://huggingface.co/docs/safetensors). The
    library's own writer needs all tensors in memory. `pieces` gives a tensor's float32 values.
    """
    code, kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + math.prod(tensor.shape) * np.dtype(kind).itemsize
        about = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor.name] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with storage.open_write(url) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            count = 0
            for piece in pieces(tensor):
                stored = np.ascontiguousarray(piece.astype(kind, copy=False))
                if not np.isfinite(stored).all():
                    raise InputError(
                        f"{tensor.name}: expected finite values in {dtype}; export it as float32, "
                        "or another checkpoint if that is refused too"
                    )
                file.write(stored.reshape(-1).view(np.uint8).data)
                count += stored.size
            assert count == math.prod(tensor.shape), tensor.name
    return end


def write_configs(folder: str, export: Export) -> None:
    tokenizer = export.tokenizer
    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    special: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos}
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
    if export.chat is not None and export.chat.end_id != eos:  # generation stops at either
        special["eos_token_id"] = [eos, export.chat.end_id]
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
