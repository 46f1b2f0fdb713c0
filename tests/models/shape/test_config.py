"""Counts are exact and impossible shapes are refused."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import pytest

from models.shape import presets
from models.shape.changes import CHANGEABLE, check_same_parameters
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.models import small
from training.checkpoint import tree_names


def arrays_of(config):
    shapes = jax.eval_shape(lambda key: Transformer.init(config, key=key), jax.random.key(0))
    return jax.tree.leaves(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_parameter_count_is_the_size_of_the_arrays(changes):
    """The count known before a run equals the number of numbers the model holds."""
    config = small.config(**changes)
    assert sum(leaf.size for leaf in arrays_of(config)) == config.parameter_count


PRESETS = re.findall(
    r'^(\w+) = TransformerConfig.*?^"""([\d,]+) parameters.*?([\d,]+) in matmuls',
    Path(presets.__file__).read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "total", "matmul"), PRESETS)
def test_presets_have_the_documented_counts(name, total, matmul):
    """The counts written beside a preset are those of the arrays that it describes."""
    config = getattr(presets, name)
    assert f"{sum(leaf.size for leaf in arrays_of(config)):,}" == total
    assert (f"{config.parameter_count:,}", f"{config.matmul_parameters:,}") == (total, matmul)
    assert len(PRESETS) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "layers"),
        ({"embed": -1}, "embed"),
        ({"mlp": 2.5}, "mlp"),
        ({"vocab_size": True}, "vocab_size"),
        ({"kv_heads": 3}, "divisor of heads=4"),
        ({"head_size": 7}, "even"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap"),
        ({"mlp_kind": "geglu"}, "mlp_kind: expected one of swiglu, relu2, relu, gelu"),
        ({"norm": "batch"}, "norm: expected one of rms"),
        ({"positions": "alibi"}, "positions: expected one of"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"embedding_std": -1.0}, "embedding_std"),
        ({"window": 4}, "set both or neither"),
        ({"window_pattern": "SL"}, "set both or neither"),
        ({"window_pattern": "SL", "window": 0}, "window"),
        ({"window_pattern": "GL", "window": 4}, "regex"),
        ({"window_pattern": ""}, "regex"),
        ({"positions": "learned"}, "set both or neither"),
        ({"context": 64}, "set both or neither"),
        ({"attention_soft_cap": float("inf")}, "attention_soft_cap"),
        ({"query_key_scale": 1.2, "qk_norm": False}, "expected 1 without qk_norm, found 1.2"),
        ({"head_std": 0.001}, "expected None with tied=True"),
        ({"residual_scale": (1.15,)}, "residual_scale"),
        ({"input_scale": (0.2, -0.05)}, "input_scale"),
        ({"value_embeddings": "all"}, "value_embeddings: expected one of none, alternate"),
    ],
)
def test_impossible_shapes_are_refused(changes, words):
    """The message is one line and names the field or the bound."""
    with pytest.raises(InputError, match=words) as error:
        small.config(**changes)
    assert "\n" not in str(error.value)


YARN = partial(YarnScaling, original_context=64)


@pytest.mark.parametrize(
    ("scaling", "changes", "words"),
    [
        (RopeScaling, {"factor": 0.0}, "RopeScaling.factor"),
        (RopeScaling, {"original_context": -1}, "original_context"),
        (RopeScaling, {"high_frequency_factor": 1.0}, "more than low_frequency_factor=1.0"),
        (YARN, {"factor": 0.5}, "YarnScaling.factor: expected float >= 1.0"),
        (YARN, {"factor": 4.0, "beta_fast": 1.0}, "more than beta_slow=1.0"),
        (YARN, {"factor": 4.0, "temperature": 0.0}, "temperature"),
    ],
)
def test_impossible_scalings_are_refused(scaling, changes, words):
    """The same for the scalings of rotary frequencies."""
    with pytest.raises(InputError, match=words):
        scaling(**changes)


CHANGED = {
    "vocab_size": 12, "vocab_multiple": 8, "layers": 3, "embed": 24, "heads": 4, "kv_heads": 1,
    "head_size": 16, "mlp": 40, "mlp_kind": "gelu", "norm": "layer", "biases": True,
    "qkv_biases": True, "qk_norm": False, "embedding_norm": True, "tied": False,
    "init_scale": 2.0, "embedding_std": 0.5, "zero_outputs": True,
    "query_key_scale": 1.2, "residual_scale": (1.15, 1.05), "input_scale": (0.2, 0.05),
    "value_embeddings": "alternate", "mlp_init_scale": 0.4, "head_std": 0.001,
    "window_pattern": "SL", "window": 7, "rope_base": 5e5,
    "rope_scaling": YarnScaling(factor=4.0, original_context=64),
    "norm_epsilon": 1e-5, "logit_soft_cap": 15.0, "attention_soft_cap": 50.0,
}  # fmt: skip
TOGETHER = {
    "window_pattern": {"window": 7},
    "window": {"window_pattern": "SL"},
    "head_std": {"tied": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_only_what_no_array_depends_on_may_change_for_trained_parameters(name):
    """An allowed field keeps every array's name and shape; the others are refused by name."""
    base = TransformerConfig(
        vocab_size=11, layers=2, embed=16, heads=2, kv_heads=2, head_size=8, mlp=32
    )
    new = dataclasses.replace(base, **{name: CHANGED[name]}, **TOGETHER.get(name, {}))
    if name not in CHANGEABLE:
        with pytest.raises(InputError, match=f"{name} .* -> "):
            check_same_parameters(base, new)
        return
    check_same_parameters(base, new)
    old, changed = (
        jax.eval_shape(lambda key, c=config: Transformer.init(c, key=key), jax.random.key(0))
        for config in (base, new)
    )
    assert tree_names.describe(old) == tree_names.describe(changed)


def test_every_field_is_either_changeable_or_refused():
    """A new field is decided about; `positions` and `context` come together."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert fields == {*CHANGED, "positions", "context"}


def test_a_list_of_two_numbers_is_a_pair():
    """As from JSON; plans look shapes up by their hash."""
    assert hash(small.config(input_scale=[0.2, 0.05])) == hash(
        small.config(input_scale=(0.2, 0.05))
    )


def test_positional_arguments_are_refused():
    """A shape is only ever given by name."""
    with pytest.raises(TypeError):
        TransformerConfig(61, 3, 24, 4, 2, 8, 40)
