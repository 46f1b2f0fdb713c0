"""Counts are exact and impossible shapes are refused."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from models import presets
from models.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.models import small


def arrays_of(config):
    shapes = jax.eval_shape(lambda key: Transformer.init(config, key=key), jax.random.key(0))
    return jax.tree.leaves(shapes)


@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_parameter_count_is_the_size_of_the_arrays(changes):
    """The count known before a run equals the number of numbers the model holds."""
    config = small.config(**changes)
    assert sum(leaf.size for leaf in arrays_of(config)) == config.parameter_count


def test_presets_have_the_documented_counts():
    """The counts written beside the presets are those of the arrays."""
    for config, count in ((presets.llama_200m, 203_452_416), (presets.tiny, 1_049_984)):
        assert config.parameter_count == count == sum(leaf.size for leaf in arrays_of(config))
    assert presets.llama_200m.matmul_parameters == 203_423_744


def test_parameters_are_float32():
    """Every parameter starts in float32."""
    assert {leaf.dtype.name for leaf in arrays_of(small.config(tied=False))} == {"float32"}


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
        ({"attention_soft_cap": float("inf")}, "attention_soft_cap"),
    ],
)
def test_impossible_shapes_are_refused(changes, words):
    """The message is one line and names the field or the bound."""
    with pytest.raises(InputError, match=words) as error:
        small.config(**changes)
    assert "\n" not in str(error.value)


def test_planning_does_not_import_jax():
    """Reading a preset and its FLOPs needs neither JAX nor NumPy."""
    code = (
        "import sys, models.presets, models.flops;"
        "print([name for name in ('jax', 'numpy', 'haliax', 'equinox') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_positional_arguments_are_refused():
    """A shape is only ever given by name."""
    with pytest.raises(TypeError):
        TransformerConfig(61, 3, 24, 4, 2, 8, 40)
