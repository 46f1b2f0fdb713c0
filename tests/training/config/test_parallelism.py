"""Which axis of an array is split over what: the order of rules, what is refused, the presets."""

import pytest

from pipeline.errors import InputError
from training.config import SPLIT_TABLES, AxisRules
from training.config.parallelism import MESH_AXES, assign

ALONE = dict.fromkeys(MESH_AXES, 1)


@pytest.mark.parametrize(
    ("axes", "mesh", "wanted"),
    [
        ({"vocab": 64, "embed": 32}, {"fsdp": 4}, {"vocab": ("fsdp",)}),
        ({"vocab": 61, "embed": 32}, {"fsdp": 4}, {"embed": ("fsdp",)}),
        (
            {"vocab": 64, "embed": 32},
            {"fsdp": 4, "tensor": 2},
            {"vocab": ("tensor",), "embed": ("fsdp",)},
        ),
        ({"embed": 32, "mlp": 64}, {"fsdp": 4}, {"embed": ("fsdp",)}),
        ({"embed": 32, "mlp": 64}, {"data": 8}, {}),
        ({"layers": 2, "head_size": 8}, {"fsdp": 4, "tensor": 2}, {}),
    ],
)
def test_parameters_between_steps(axes, mesh, wanted):
    """Tables by ids where these divide, the rest along embed, what tensor splits along its own."""
    assert assign(axes, AxisRules().params, ALONE | mesh) == wanted


def test_an_axis_that_does_not_divide_is_refused():
    """Unless another axis of the array takes the devices."""
    with pytest.raises(InputError, match="embed 30 is not divisible by the 4 devices"):
        assign({"embed": 30}, AxisRules().params, ALONE | {"fsdp": 4})


@pytest.mark.parametrize(
    "rules",
    [
        {"params": "embed"},
        {"params": (("embed",),)},
        {"params": (("embed", ("rows",)),)},
        {"params": (("embed", ()),)},
        {"activations": (("batch", ("data",)), ("kv_heads", ("data",)))},
        {"activations": (("position", ("tensor",)), ("kv_heads", ("tensor",)))},
    ],
)
def test_rules_that_cannot_be_are_refused(rules):
    """What is no rule, names no mesh axis, or gives one to both tokens and heads."""
    with pytest.raises(InputError, match="AxisRules"):
        AxisRules(**rules)


def test_the_preset_that_splits_tables_does():
    assert SPLIT_TABLES.splits_tables
    assert not AxisRules().splits_tables
