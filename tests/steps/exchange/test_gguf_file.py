"""GGUF files against the models they are made of, read by `transformers` and by `gguf`.

What llama.cpp computes from them is in `tests.bench.gguf_export`.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from steps.exchange.gguf.file import llama3_factors, write_gguf
from steps.exchange.hf.hf_files import read_model
from tests.steps.exchange import hf_folders
from tests.steps.exchange.hf_folders import MODELS, NEEDS_ORACLE, ROWS, folder

pytestmark = [pytest.mark.slow, NEEDS_ORACLE]

# Of a float32 number and of the largest one of a block: half of the last digit kept.
ROUNDING = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11}
SAME = {  # in transformers' words
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_ctx",
    "vocab_size": "vocab_size",
}


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory):
    """(name, result, path) of a file in float32."""
    path = str(tmp_path_factory.mktemp("gguf") / "model.gguf")
    name = request.param
    return name, write_gguf(str(folder(name)), path, "f32", name), path


def test_transformers_reads_the_same_model(written):
    """Every tensor bit for bit, and the hyperparameters, by its own reader of GGUF."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    name, result, path = written
    model, config = hf_folders.model(name), hf_folders.config_of(name)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert read["tensors"].keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(read["tensors"][key].numpy().reshape(value.shape), value, key)
    assert result["parameters"] == model.num_parameters() + (
        16 if name == "llama_stretched" else 0  # factors of half a head
    )
    for theirs, short in SAME.items():
        key = theirs if theirs in read["config"] else short
        assert read["config"][key] == getattr(config, theirs), theirs
    assert read["config"]["tie_word_embeddings"] == config.tie_word_embeddings
    assert read["config"]["eos_token_id"] == read["config"]["bos_token_id"] == 0


def test_transformers_reads_the_same_tokenizer(written):
    """Of Llama 3's expression too; its converter splits by GPT-2's for gpt2."""
    from transformers import AutoTokenizer

    name, _, path = written
    read = AutoTokenizer.from_pretrained(path.rpartition("/")[0], gguf_file="model.gguf")
    text = "def f(x):\n    return 'words' of a text, and 3.14 in it"
    assert read(text).input_ids == hf_folders.tokenizer(name).encode_batch([text])[0].tolist()


def value(reader: GGUFReader, key: str):
    """A field of the metadata."""
    return reader.fields[key].contents()


def test_metadata_that_transformers_does_not_read(written):
    """As llama.cpp names it."""
    name, result, path = written
    reader, config = GGUFReader(path), hf_folders.config_of(name)
    arch = value(reader, "general.architecture")
    assert result["architecture"] == arch == MODELS[name][0].lower()
    assert value(reader, "general.name") == name
    assert value(reader, "general.file_type") == 0
    assert value(reader, "tokenizer.ggml.model") == "gpt2"
    assert value(reader, "tokenizer.ggml.pre") == result["pre_tokenizer"]
    assert value(reader, "tokenizer.ggml.add_bos_token") is False
    assert len(value(reader, "tokenizer.ggml.tokens")) == ROWS
    assert result["tensors"] == len(reader.tensors)
    if arch == "gpt2":
        assert value(reader, "gpt2.feed_forward_length") == config.n_inner
        return
    assert value(reader, f"{arch}.attention.key_length") == config.head_dim
    assert value(reader, f"{arch}.attention.value_length") == config.head_dim
    assert value(reader, f"{arch}.rope.dimension_count") == config.head_dim


def test_stretched_rotary_positions():
    """Llama 3's factors are those that `transformers` divides its frequencies by."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = hf_folders.config_of("llama_stretched")
    model = read_model(str(folder("llama_stretched")))
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    base = 1e4 ** -(np.arange(0, 32, 2) / 32)
    factors = llama3_factors(model.config)
    np.testing.assert_allclose(factors, base / stretched.numpy(), rtol=2e-6)
    assert (factors.min(), factors.max()) == (1.0, 8.0)
    assert ((factors > 1.0) & (factors < 8.0)).sum() == 3  # the blended ones


def test_yarn(tmp_path):
    """llama.cpp multiplies the factor of the paper by what stands in the file."""
    path = str(tmp_path / "model.gguf")
    write_gguf(str(folder("qwen3_yarn")), path, "f16", "yarn")
    reader = GGUFReader(path)
    assert value(reader, "qwen3.rope.scaling.type") == "yarn"
    assert value(reader, "qwen3.rope.scaling.factor") == 4.0
    assert value(reader, "qwen3.rope.scaling.original_context_length") == 64
    paper = 0.1 * np.log(4.0) + 1
    assert value(reader, "qwen3.rope.scaling.attn_factor") * paper == pytest.approx(1.3, rel=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["llama_biases", "llama_odd_rows", "gpt2"])
def test_narrower_numbers(tmp_path, name, dtype):
    """Are the float32 ones to rounding; vectors and learned positions stay float32."""
    exact, narrow = str(tmp_path / "exact.gguf"), str(tmp_path / "narrow.gguf")
    write_gguf(str(folder(name)), exact, "f32", name)
    write_gguf(str(folder(name)), narrow, dtype, name)
    kinds = set()
    for full, small in zip(GGUFReader(exact).tensors, GGUFReader(narrow).tensors, strict=True):
        assert full.name == small.name
        kind = GGMLQuantizationType(small.tensor_type)
        values = dequantize(small.data, kind).reshape(full.data.shape)
        matrix = full.data.ndim == 2 and not full.name.startswith("position")
        fits = full.data.shape[-1] % 32 == 0
        wanted = dtype if dtype != "q8_0" or fits else "f16"
        assert kind.name.lower() == (wanted if matrix else "f32"), full.name
        rounding = ROUNDING[kind.name.lower()]
        if kind is GGMLQuantizationType.Q8_0:
            blocks = np.abs(full.data).reshape(*full.data.shape[:-1], -1, 32)
            rounding = np.repeat(blocks.max(-1), 32, -1) * rounding
        else:
            rounding = np.abs(full.data) * rounding
        assert (np.abs(values - full.data) <= rounding + 1e-7).all(), full.name
        kinds.add(kind.name.lower())
    assert dtype in kinds
    assert ("f16" in kinds) == (dtype == "f16" or (name == "llama_odd_rows" and dtype == "q8_0"))
