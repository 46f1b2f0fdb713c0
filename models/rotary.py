"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half-split as in Llama.

Feature i of the first half and feature i of the second half are one pair, turned by
position * base^(-2i / head_size). The score of a query and a key then depends on positions only
through their difference. Angles and the rotation are float32: bfloat16 cannot tell positions
apart beyond 256. The angles are traced, never evaluated eagerly, so that a program can be compiled
ahead of time for devices that are not there.
"""

from __future__ import annotations

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


def rotary_angles(Position: Axis, HeadSize: Axis, base: float) -> NamedArray:
    """Angles in radians, float32 [position, head_size / 2]."""
    Half = HeadSize.resize(HeadSize.size // 2)
    exponent = hax.arange(Half, dtype=jnp.float32) * (-2.0 / HeadSize.size)
    frequency = hax.exp(exponent * jnp.log(jnp.float32(base)))
    return hax.arange(Position, dtype=jnp.float32).broadcast_axis(Half) * frequency


def rotate(x: NamedArray, angles: NamedArray) -> NamedArray:
    """`x` [..., position, ..., head_size] turned by `angles`; axes and dtype unchanged."""
    HeadSize = x.resolve_axis("head_size")
    half = HeadSize.size // 2
    wide = x.astype(jnp.float32)
    first = wide[HeadSize, :half]
    second = wide[HeadSize, half:]
    cos, sin = hax.cos(angles), hax.sin(angles)
    turned = hax.concatenate(HeadSize, [first * cos - second * sin, second * cos + first * sin])
    return turned.rearrange(x.axes).astype(x.dtype)
