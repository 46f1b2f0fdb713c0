"""Settings that JAX reads from the environment change neither a model nor a sample."""

import jax
import numpy as np
import pytest

from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from models.jax_numerics import FIXED, exact_products, fixed_numerics, random_key
from tests.training import tiny

OTHER = {
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 3,
    "jax_high_dynamic_range_gumbel": True,
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_softmax_custom_jvp": True,
    "jax_traceback_in_locations_limit": 7,
}


def numbers():
    """Initial parameters as training makes them, and sampled text."""
    with fixed_numerics():
        model = tiny.program().init().model
    text = generate(model, [[1, 2]], new_tokens=8, sampling=Sampling(temperature=2.0, seed=4))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)], text


@pytest.fixture
def settings():
    """Sets settings of JAX, as environment variables do for a whole process."""
    before = {name: getattr(jax.config, name) for name in OTHER}
    yield lambda changed: [jax.config.update(name, value) for name, value in changed.items()]
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [*({n: v} for n, v in OTHER.items()), OTHER], ids=str)
def test_no_setting_of_the_environment_changes_a_model_or_a_sample(settings, changed):
    """The same bits and the same ids, whatever JAX read when it started."""
    want = numbers()
    settings(changed)
    assert numbers() == want


def test_the_callers_settings_come_back(settings):
    """After nested contexts too, and every fixed setting is tried above."""
    settings(OTHER)
    with fixed_numerics(), fixed_numerics():
        assert {name: getattr(jax.config, name) for name in FIXED} == FIXED
    assert {name: getattr(jax.config, name) for name in OTHER} == OTHER
    assert OTHER.keys() == FIXED.keys()


def test_exact_products_end_with_their_context():
    """Also where the fixed settings are entered inside of it."""
    before = jax.config.jax_default_matmul_precision
    with exact_products("float32"):
        random_key(0)
        assert jax.config.jax_default_matmul_precision == "float32"
    assert jax.config.jax_default_matmul_precision == before


KERNEL = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

def kernel(x, out):
    out[...] = x[...] * 2

SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
call = jax.jit(lambda x: pl.pallas_call(kernel, out_shape=SHAPE)(x))
text = call.trace(SHAPE).lower(lowering_platforms=("tpu",)).as_text()
"""


def test_a_kernel_for_tpus_is_the_same_program_on_another_line():
    """JAX's compilation cache, which hashes it, then knows it again."""

    def text(name, lines):
        found = {}
        exec(compile("\n" * lines + KERNEL, name, "exec"), found)
        return found["text"]

    assert text("a.py", 0) != text("b.py", 3), "the setting has a use"
    with fixed_numerics():
        assert text("a.py", 0) == text("b.py", 3)
