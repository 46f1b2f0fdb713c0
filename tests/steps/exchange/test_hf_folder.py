"""Which parameters of a checkpoint are exported, and what a damaged one gives."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.hf.architectures import architecture_of, to_json
from pipeline.errors import CorruptOutput, InputError
from steps.exchange.hf.hf_files import SINGLE
from steps.exchange.hf.hf_folder import DTYPES, Export, write_hf_folder, write_shard
from tests.models import small
from training.checkpoint.checkpointer import Checkpointer

CONFIG = small.config(vocab_multiple=32, tied=False)  # 61 ids in 64 rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, its ema, and a checkpoint of both."""
    model = small.model(vocab_multiple=32, tied=False)
    ema = jax.tree.map(lambda x: x * 0.5, model)
    writer = Checkpointer(str(tmp_path_factory.mktemp("run")), attempt="a", chunk_bytes=1500)
    path = writer.save(3, {"model": model, "ema": ema}, {})
    writer.wait()
    return model, ema, path


def export(path, config=CONFIG, **more):
    return Export(checkpoint=path, config=config, positions=16, tokenizer=None, **more)


@pytest.mark.parametrize("parameters", ["ema", "last"])
def test_the_parameters_asked_for(saved, tmp_path, parameters):
    """In many chunks, without the rows that pad the vocabulary, matrices transposed."""
    model, ema, path = saved
    written = write_hf_folder(str(tmp_path), export(path, parameters=parameters, dtype="float32"))
    assert written["parameters"] == parameters
    want = ema if parameters == "ema" else model
    found = load_file(tmp_path / SINGLE)
    assert found["lm_head.weight"].shape == (61, 24)
    np.testing.assert_array_equal(found["lm_head.weight"], want.head.array[:61])
    blocks = want.blocks.stacked
    for layer in range(CONFIG.layers):
        name = f"model.layers.{layer}"
        up = np.asarray(blocks.mlp.up.matrix.array[layer])
        np.testing.assert_array_equal(found[f"{name}.mlp.up_proj.weight"], up.T)
        norm = np.asarray(blocks.attention.key_norm.weight.array[layer])
        np.testing.assert_array_equal(found[f"{name}.self_attn.k_norm.weight"], norm)
        out = np.asarray(blocks.attention.output.matrix.array[layer]).reshape(32, 24)
        np.testing.assert_array_equal(found[f"{name}.self_attn.o_proj.weight"], out.T)
    assert to_json(CONFIG, 16)["vocab_size"] == 61


def test_bfloat16_is_the_default(saved, tmp_path):
    """Rounded to nearest, half as large."""
    for name, how in (("half", {}), ("whole", {"dtype": "float32"})):
        write_hf_folder(str(tmp_path / name), export(saved[2], **how))
    half, whole = (load_file(tmp_path / name / SINGLE) for name in ("half", "whole"))
    for name, values in whole.items():
        want = values.astype(ml_dtypes.bfloat16).view(np.int16)
        np.testing.assert_array_equal(half[name].view(np.int16), want)


def test_a_damaged_chunk_is_found(saved, tmp_path):
    """By the name of its file; a checkpoint of another shape by the name of the array."""
    _, _, path = saved
    other = small.config(vocab_multiple=32, tied=False, mlp=48)
    with pytest.raises(
        InputError, match=r"mlp\.gate\.matrix' is float32\[layers 3, embed 24, mlp 40\]"
    ):
        write_hf_folder(str(tmp_path / "x"), export(path, config=other))
    chunk = min(Path(path).glob("arrays/ema.blocks.stacked.mlp.up.matrix/c.1*"))
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(CorruptOutput, match=r"mlp\.up\.matrix/c\.1.* CRC-32C"):
        write_hf_folder(str(tmp_path / "y"), export(path))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_in_the_file(tmp_path, value, dtype):
    """Are refused by the name of the tensor; bfloat16 rounds the largest float32 to infinity."""
    (norm,) = (t for t in architecture_of(CONFIG).tensors(CONFIG) if t.name == "model.norm.weight")
    values = np.array([1.0] * (CONFIG.embed - 1) + [value], np.float32)
    path = str(tmp_path / "model.safetensors")
    if dtype == "float32" and np.isfinite(value):
        write_shard(path, [norm], dtype, lambda _: [values])
        np.testing.assert_array_equal(load_file(path)[norm.name], values)
        return
    with pytest.raises(InputError, match=rf"model\.norm\.weight: expected finite .* {dtype}"):
        write_shard(path, [norm], dtype, lambda _: [values])
