"""Shapes and config.json, both ways, against `transformers`."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from models.generate.generate import generate
from models.hf.architectures import architecture_of, describe, from_json, to_json
from models.shape import presets
from models.shape.config import YarnScaling
from pipeline.errors import InputError
from tests.models import small
from tests.models.hf.shapes import POSITIONS, SHAPES
from tests.models.test_transformers import NEEDS_ORACLE, theirs

WRITERS = ("Mistral", "GPT2", "NanoChat")  # windows, learned positions, and all the rest
NEW = 8
PROMPTS = [[5, 17, 3, 88], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@NEEDS_ORACLE
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_numbers(name):
    """Logits to 1e-4 of the largest, the same greedy tokens, and the shape back from theirs."""
    from tests.models import transformers_weights as weights

    config = SHAPES[name]
    model = weights.random_model(config, POSITIONS)
    assert type(model).__name__.startswith(name.split()[0])
    ours = weights.ours(config, weights.numpy_state(model.state_dict()))
    rows = small.tokens(2, 40, config.vocab_size)
    got = small.run(lambda m: m.logits(small.named(rows)).array, ours)
    want = theirs(model, rows)
    assert abs(want).max() > 1
    assert small.relative(got, want) < 1e-4

    if name in WRITERS:
        assert_same_text(ours, model)

    architecture, back, positions = from_json(
        json.loads(model.config.to_json_string(use_diff=False))
    )
    assert architecture.name == type(model).__name__
    assert (back, positions) == (config, POSITIONS)


def assert_same_text(ours, model):
    """Greedy."""
    import torch

    # Theirs one by one with a cache of its own, ours together.
    for prompt, written in zip(PROMPTS, generate(ours, PROMPTS, new_tokens=NEW), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert written == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_config_json_there_and_back(name):
    """What is written is read as the same shape, in the old form of RoPE as well."""
    config = SHAPES[name]
    content = json.loads(json.dumps(to_json(config, POSITIONS)))
    assert from_json(content)[1:] == (config, POSITIONS)
    content.pop("rope_parameters", None)
    assert from_json(content)[1] == config


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_has_one_tensor(name):
    """Sizes add up to the model's, and every value comes back as it was, bit by bit."""
    config = SHAPES[name]
    tensors = list(architecture_of(config).tensors(config))
    assert sum(np.prod(tensor.shape) for tensor in tensors) == config.parameter_count
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    parts = [(part.path, part.layer) for tensor in tensors for part in tensor.parts]
    assert len(set(parts)) == len(parts)
    rng = np.random.default_rng(0)
    for tensor in tensors:
        values = rng.normal(size=tensor.shape).astype(np.float32)
        np.testing.assert_array_equal(tensor.join(tensor.split(values)), values)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (presets.llama_200m, "as Qwen3ForCausalLM"),
        (presets.llama_3_2_1b, "as LlamaForCausalLM"),
        (presets.tpuchat_130m, r"Qwen3ForCausalLM but for norm='plain_rms', logit_soft_cap"),
        (presets.nanochat_d16, "but for embedding_norm=False, window_pattern='SSSL'"),
        (presets.bytes_tiny, "GPT2LMHeadModel but for mlp_kind='relu'"),
        (dataclasses.replace(presets.tiny, attention_soft_cap=50.0), "attention_soft_cap=50.0"),
        (dataclasses.replace(presets.tiny, biases=True), "Qwen3ForCausalLM but for biases"),
        (
            dataclasses.replace(
                SHAPES["NanoChat"], rope_scaling=YarnScaling(factor=2, original_context=9)
            ),
            "but for rope_scaling",
        ),
        (dataclasses.replace(SHAPES["Llama tied"], embed=50), "not a multiple of heads"),
    ],
)
def test_the_line_of_plan(config, line):
    """The architecture, or the fields that prevent one."""
    assert re.search(line, describe(config)), describe(config)


CONTENT = to_json(SHAPES["Llama tied"], POSITIONS)
QWEN = to_json(SHAPES["Qwen3"], POSITIONS)
GPT2 = to_json(SHAPES["GPT2"], POSITIONS)
NANOCHAT = to_json(SHAPES["NanoChat"], POSITIONS)
YARN = to_json(SHAPES["Llama odd, untied, yarn"], POSITIONS)["rope_parameters"]
LLAMA3 = to_json(SHAPES["Llama llama3 rope, biases"], POSITIONS)["rope_scaling"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({**CONTENT, "architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM cannot be"),
        ({**CONTENT, "rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is unkn"),
        ({**CONTENT, "rope_parameters": {"rope_type": "llama3"}}, "expected factor, found none"),
        ({**CONTENT, "rope_parameters": {"rope_type": "yarn", "mscale": 2.0}}, "key 'mscale'"),
        (
            {
                **CONTENT,
                "rope_scaling": {"type": "yarn", "factor": 8.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "disagree; leave one out",
        ),
        (
            {**CONTENT, "rope_parameters": {"rope_type": "llama3", "factor": "8"}},
            "factor: expected a number, found '8'",
        ),
        ({**CONTENT, "rope_scaling": {"rope_type": "default", "rope_theta": 9.0}}, "disagree"),
        ({**CONTENT, "rope_theta": 0, "rope_parameters": None}, "rope_theta: expected a number ab"),
        ({**CONTENT, "rope_theta": 1e39, "rope_parameters": None}, "rope_theta: expected a number"),
        *(
            ({**CONTENT, "rope_parameters": {**LLAMA3, name: None}}, f"expected {name}, found none")
            for name in ("factor", "low_freq_factor", "high_freq_factor")
        ),
        ({**CONTENT, "rope_parameters": {**YARN, "rope_theta": 1.0}}, "expected a number above 1"),
        ({**NANOCHAT, "rope_parameters": YARN}, "'yarn': NanoChat's norm"),
        ({**CONTENT, "model_type": "mistral"}, "LlamaForCausalLM and model_type is 'mistral'"),
        ({**CONTENT, "num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of heads"),
        ({**CONTENT, "rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, found 0"),
        (
            {**QWEN, "use_sliding_window": True, "sliding_window": 0},
            "sliding_window: expected a po",
        ),
        ({**CONTENT, "is_causal": False}, "is_causal is False"),
        ({**CONTENT, "tie_word_embeddings": "no"}, "expected true or false, found 'no'"),
        ({**CONTENT, "architectures": "LlamaForCausalLM"}, "architectures: expected a list"),
        ({**CONTENT, "hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({**CONTENT, "mlp_bias": True}, "mlp_bias is True"),
        ({**CONTENT, "attention_bias": True}, "mlp_bias is False; only True"),
        ({**CONTENT, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**CONTENT, "attention_multiplier": 0.1}, "unknown key 'attention_multiplier' = 0.1"),
        ({**CONTENT, "quantization_config": {"bits": 4}}, "quantization_config is"),
        ({**CONTENT, "hidden_size": "48"}, "hidden_size: expected a positive integer, found '48'"),
        ({**QWEN, "layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ({**QWEN, "layer_types": ["full_attention"]}, "expected a list of 3"),
        ({**QWEN, "attention_bias": True}, "attention_bias is True"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({k: v for k, v in CONTENT.items() if k != "hidden_size"}, "hidden_size: expected"),
    ],
)
def test_what_cannot_be_computed_is_refused(content, line):
    """In one line that names the key."""
    with pytest.raises(InputError, match=line) as caught:
        from_json(content)
    assert "\n" not in str(caught.value)


def test_a_key_that_the_caller_knows():
    """Is passed over, inside the rotary settings too."""
    inner = {**CONTENT["rope_parameters"], "mrope_section": [2, 3]}
    for form in ("rope_parameters", "rope_scaling"):
        content = {**CONTENT, "attention_multiplier": 0.1, "rope_parameters": None, form: inner}
        with pytest.raises(InputError, match="leave it out, or name it in ignore_keys"):
            from_json(content, ["attention_multiplier"])
        known = ["attention_multiplier", "mrope_section"]
        assert from_json(content, known)[1] == SHAPES["Llama tied"]


@pytest.mark.parametrize(
    ("kind", "name", "field", "left_out", "null"),
    [
        ("Llama", "num_key_value_heads", "kv_heads", 64, 64),
        ("Mistral", "num_key_value_heads", "kv_heads", 8, 64),
        ("Qwen2", "num_key_value_heads", "kv_heads", 32, 64),
        ("Qwen2", "head_dim", "head_size", 2, 2),
        ("Qwen3", "head_dim", "head_size", 128, 2),
        ("Mistral", "sliding_window", "window", 4096, None),
        ("NanoChat", "final_logit_softcapping", "logit_soft_cap", 15.0, None),
        ("Llama", "rms_norm_eps", "norm_epsilon", 1e-6, 1e-6),
    ],
)
def test_keys_that_are_left_out_or_null(kind, name, field, left_out, null):
    """Have the values of `transformers`, where it reads them."""
    content = to_json(SHAPES[next(shape for shape in SHAPES if shape.startswith(kind))], POSITIONS)
    content |= {"hidden_size": 128, "num_attention_heads": 64, "head_dim": 4, name: None}
    assert getattr(from_json(content)[1], field) == null
    del content[name]
    assert getattr(from_json(content)[1], field) == left_out


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_the_original_context(form, scaling):
    """Beside the settings comes before inside them; without either it is the longest sequence."""
    content = {**CONTENT, "rope_parameters": None, "rope_scaling": None, form: scaling}
    name = "original_max_position_embeddings"

    def read(**more) -> int:
        return from_json({**content, **more})[1].rope_scaling.original_context

    without = {key: value for key, value in scaling.items() if key != name}
    assert read() == scaling[name]
    assert read(**{name: 48}) == read(**{name: 48, form: without}) == 48
    assert read(**{form: without}) == POSITIONS
