"""Folders that no GGUF file is made of, as llama.cpp would compute something else; without PyTorch.

What is in the files that are made, `test_gguf_file` says.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from models.hf.architectures import to_json
from pipeline.errors import InputError
from steps.exchange.gguf.file import write_gguf
from tests.models.hf.shapes import POSITIONS, SHAPES
from tests.steps.exchange.hf_folders import ROWS, SMALL, SMALL_FILES, write_small


@pytest.fixture
def folder(tmp_path):
    """A folder to damage."""
    path = tmp_path / "model"
    path.mkdir()
    write_small(path)
    return path


def refused(folder, line, dtype="f16"):
    """In one line."""
    with pytest.raises(InputError, match=line) as caught:
        write_gguf(str(folder), str(folder / "out.gguf"), dtype, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("NanoChat", "NanoChatForCausalLM has no counterpart"),
        ("Mistral", "MistralForCausalLM has no counterpart"),
        ("Qwen3 windows", "a window of 5; .* attends to the whole sequence"),
        ("Qwen3 llama3", "'llama3'; llama.cpp's Qwen3ForCausalLM reads no such factors"),
    ],
)
def test_shapes_that_llama_cpp_has_not(tmp_path, name, line):
    """Though an import has them."""
    content = {**to_json(SHAPES.get(name, SHAPES["Qwen3"]), POSITIONS), "vocab_size": ROWS}
    if name == "Qwen3 llama3":
        scaling = to_json(SHAPES["Llama llama3 rope, biases"], POSITIONS)["rope_parameters"]
        content |= {"rope_parameters": scaling, "rope_scaling": None}
    write_small(tmp_path, content)
    refused(tmp_path, line)


BF16 = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


@pytest.mark.parametrize("name", ["mlp.up_proj", "input_layernorm"])
@pytest.mark.parametrize(
    ("value", "dtypes", "line"),
    [
        (np.nan, ("f32", "f16", "bf16", "q8_0"), "expected finite values, found nan"),
        (-np.inf, ("f32", "f16", "bf16", "q8_0"), "expected finite values, found inf"),
        (1e5, ("f16",), "has numbers beyond F16's 65,504; export as bf16"),
        (1e7, ("f16", "q8_0"), "has numbers beyond .*; export as bf16"),
        (np.nextafter(np.float32(BF16), np.float32(np.inf)), ("bf16",), "export as f32"),
    ],
)
def test_numbers_that_the_file_cannot_hold(folder, name, value, dtypes, line):
    """A vector is stored as float32, a matrix of a width that q8_0 does not divide as float16."""
    name = f"model.layers.0.{name}.weight"
    path = next(folder / f for f in SMALL_FILES if name in load_file(folder / f))
    tensors = {k: v.astype(np.float32) for k, v in load_file(path).items()}
    tensors[name].flat[3] = value
    save_file(tensors, path)
    for dtype in ("f32", "f16", "bf16", "q8_0"):
        if dtype in dtypes and (not np.isfinite(value) or tensors[name].ndim == 2):
            refused(folder, line, dtype)
        elif np.isfinite(value) and (tensors[name].ndim == 1 or dtype in ("f32", "bf16")):
            write_gguf(str(folder), str(folder / "out.gguf"), dtype, "x")


def test_keys_that_the_file_leaves_out(folder):
    """Have the values of `transformers`."""
    left_out = ("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters")
    content = {name: value for name, value in SMALL.items() if name not in left_out}
    (folder / "config.json").write_text(json.dumps(content))
    write_gguf(str(folder), str(folder / "out.gguf"), "f16", "x")
    fields = GGUFReader(folder / "out.gguf").fields
    assert fields["qwen3.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-6)
    assert fields["qwen3.context_length"].contents() == 32_768
    assert fields["qwen3.rope.freq_base"].contents() == 10_000.0
