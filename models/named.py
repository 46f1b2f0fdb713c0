"""The names of haliax in use. No other module imports haliax: its next break is mended here."""
# ruff: noqa: F401

from haliax import (
    Axis,
    NamedArray,
    arange,
    auto_sharded,
    axis_mapping,
    concatenate,
    cos,
    dot,
    exp,
    isfinite,
    make_axes,
    max,
    maximum,
    mean,
    named,
    ones,
    rsqrt,
    shard,
    sin,
    square,
    sum,
    tanh,
    tree_checkpoint_name,
    where,
    zeros,
)
from haliax.nn import Stacked, gelu, sigmoid, silu
from haliax.partitioning import set_mesh
from haliax.random import truncated_normal, uniform
