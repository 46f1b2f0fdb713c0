"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half-split as in Llama.

Feature i of the first half and feature i of the second half are one pair, turned by
position * base^(-2i / head_size). The score of a query and a key then depends on positions only
through their difference. Angles and the rotation are float32: bfloat16 cannot tell positions
apart beyond 256. The angles are traced, never evaluated eagerly, so that a program can be compiled
ahead of time for devices that are not there.
"""

from __future__ import annotations

import math

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.axes import HEAD_SIZE
from models.config import RopeScaling, YarnScaling


def rotary_angles(
    positions: Axis | NamedArray,
    HeadSize: Axis,
    base: float,
    scaling: RopeScaling | YarnScaling | None = None,
) -> NamedArray:
    """Angles in radians, float32 [head_size / 2, ...] with the axes of `positions`.

    Args:
        positions: integers; an axis stands for its indices.
        HeadSize: the features that are turned.
        base: of the frequencies.
        scaling: of the frequencies.
    """
    Half = HeadSize.resize(HeadSize.size // 2)
    exponent = hax.arange(Half, dtype=jnp.float32) * (-2.0 / HeadSize.size)
    frequency = hax.exp(exponent * jnp.log(jnp.float32(base)))
    if isinstance(scaling, RopeScaling):
        frequency = _llama3(frequency, scaling)
    elif scaling is not None:
        frequency = _yarn(frequency, HeadSize.size, base, scaling)
    if isinstance(positions, Axis):
        return frequency.broadcast_to((Half, positions)) * hax.arange(positions, dtype=jnp.float32)
    return frequency.broadcast_to((Half, *positions.axes)) * positions.astype(jnp.float32)


def _llama3(frequency: NamedArray, scaling: RopeScaling) -> NamedArray:
    """Llama 3: turns per original context decide between the frequency and a slower one."""
    turns = frequency * (scaling.original_context / (2 * math.pi))
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    keep = hax.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def _yarn(frequency: NamedArray, size: int, base: float, scaling: YarnScaling) -> NamedArray:
    """YaRN: the pair's index decides, between two pairs that turn so often in the context."""

    def pair(turns: float) -> float:
        wavelength = scaling.original_context / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    # Whole pairs, bounded as in the released code.
    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), size - 1)
    index = hax.arange(frequency.axes[0], dtype=jnp.float32)
    slower = hax.clip((index - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequency * (1.0 - slower + slower / scaling.factor)


def rotate(x: NamedArray, angles: NamedArray, scale: float = 1.0) -> NamedArray:
    """`x` [..., position, ..., head_size] turned by `angles`, times `scale`; dtype unchanged."""
    HeadSize = x.resolve_axis(HEAD_SIZE)
    half = HeadSize.size // 2
    wide = x.astype(jnp.float32)
    first = wide[HeadSize, :half]
    second = wide[HeadSize, half:]
    cos, sin = hax.cos(angles) * scale, hax.sin(angles) * scale
    turned = hax.concatenate(HeadSize, [first * cos - second * sin, second * cos + first * sin])
    return turned.rearrange(x.axes).astype(x.dtype)
