"""Which options the compiler gets; what they do to a program is in `step/test_tpu_compile.py`."""

import pytest

from pipeline.errors import InputError
from tests.training import tiny
from training.config import TrainConfig
from training.cost.compiler_options import compiler_options

OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


@pytest.mark.parametrize(
    ("platform", "chip", "devices", "offloads", "count"),
    [
        ("tpu", "v6e", 16, True, 8),
        ("tpu", "v6e", 1, False, 3),  # nothing to communicate
        ("tpu", "v5p", 16, True, 8),
        ("tpu", "v5e", 16, False, 3),  # which has no SparseCores
        ("gpu", "h100", 8, False, 1),
        ("gpu", "h100", 1, False, 0),
        ("cpu", "", 8, False, 0),
    ],
)
def test_options_are_those_of_the_chip(platform, chip, devices, offloads, count):
    """Collectives go to the SparseCores of chips that have them, where there are several chips."""
    found = compiler_options(platform, chip, devices)
    assert (OFFLOAD in found, len(found)) == (offloads, count)


def test_a_setting_adds_changes_and_removes_options():
    usual = compiler_options("tpu", "v6e", 16)
    found = compiler_options("tpu", "v6e", 16, ((OFFLOAD, "default"), ("xla_new", "3")))
    assert found == {**{n: v for n, v in usual.items() if n != OFFLOAD}, "xla_new": "3"}


def test_the_step_is_compiled_with_them():
    """An option that the compiler does not know is refused by it, by name; others are taken."""
    tiny.program(compiler_options=(("xla_cpu_enable_fast_math", "false"),)).compile()
    program = tiny.program(compiler_options=(("xla_no_such_option", "true"),))
    with pytest.raises(Exception, match="xla_no_such_option"):
        program.compile()


def test_other_values_are_refused():
    with pytest.raises(InputError, match="compiler_options"):
        TrainConfig(steps=1, batch_size=1, compiler_options=(("xla_new", 3),))
