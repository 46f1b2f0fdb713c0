"""Small Hugging Face folders as `transformers` saves them, with random weights."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from data.tokenizer.text_tokenizer import TextTokenizer
from models.hf.architectures import from_json, to_json
from steps.exchange.hf.tokenizer_files import write_tokenizer_files
from tests.data.tokenizer.split_tokenizers import tokenizer_json
from tests.models.hf import shapes
from tests.models.test_transformers import NEEDS_ORACLE as NEEDS_ORACLE

ROWS, POSITIONS = 1024, 256  # the tokenizers have 1,000 ids

_LLAMA = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
}
_GPT2 = {
    "vocab_size": ROWS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "n_inner": 96,
}
_STRETCHED = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
_BY_PARTS = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **_STRETCHED,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **_STRETCHED}

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", _LLAMA, "llama3"),
    "llama_biases": (
        "Llama",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "gpt2",
    ),
    "llama_stretched": (
        "Llama",
        {**_LLAMA, "rope_parameters": _BY_PARTS},
        "gpt2",
    ),
    "llama_odd_rows": ("Llama", {**_LLAMA, "hidden_size": 48, "intermediate_size": 72}, "gpt2"),
    "qwen3": ("Qwen3", {**_LLAMA, "tie_word_embeddings": True}, "gpt2"),
    "qwen3_yarn": ("Qwen3", {**_LLAMA, "rope_parameters": _YARN}, "qwen2"),
    "gpt2": ("GPT2", _GPT2, "gpt2 split"),
}
"""Class in `transformers`, its settings, and a tokenizer of `tests.data.tokenizer`."""


def config_of(name: str) -> Any:
    """The configuration of one of `MODELS`, an object of `transformers`."""
    import transformers

    kind, settings, _ = MODELS[name]
    return getattr(transformers, f"{kind}Config")(**settings, bos_token_id=0, eos_token_id=0)


@functools.cache
def model(name: str) -> Any:
    """One of `MODELS` in float32."""
    import transformers

    from tests.models.transformers_weights import randomized

    head = "LMHeadModel" if MODELS[name][0] == "GPT2" else "ForCausalLM"
    return randomized(getattr(transformers, MODELS[name][0] + head)(config_of(name)), seed=3)


@functools.cache
def tokenizer(name: str) -> TextTokenizer:
    """The tokenizer of one of `MODELS`."""
    return TextTokenizer(tokenizer_json(MODELS[name][2]))


@functools.cache
def folder(name: str) -> Path:
    """A folder with one of `MODELS` and its tokenizer; not to be written to."""
    _kept.append(tempfile.TemporaryDirectory())
    path = Path(_kept[-1].name)
    model(name).save_pretrained(path)
    write_tokenizer_files(tokenizer(name), str(path), ROWS, POSITIONS)
    return path


SMALL = {**to_json(shapes.SHAPES["Qwen3"], shapes.POSITIONS), "vocab_size": ROWS}
SMALL_FILES = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "model.safetensors.index.json"


def write_small(folder: Path, content: dict[str, Any] = SMALL) -> None:
    """A model of a config.json in two safetensors files, written with numpy alone."""
    architecture, config, _ = from_json(content)
    rng = np.random.default_rng(0)
    tensors = {
        tensor.name: rng.normal(size=tensor.shape).astype(np.float16)
        for tensor in architecture.tensors(config)
    }
    names = sorted(tensors)
    weights = {name: SMALL_FILES[i % 2] for i, name in enumerate(names)}
    for file in SMALL_FILES:
        mine = {name: tensors[name] for name in names if weights[name] == file}
        save_file(mine, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (folder / "config.json").write_text(json.dumps(content))
    small = TextTokenizer(tokenizer_json("gpt2"))
    write_tokenizer_files(small, str(folder), ROWS, shapes.POSITIONS)


_kept: list[tempfile.TemporaryDirectory[str]] = []
