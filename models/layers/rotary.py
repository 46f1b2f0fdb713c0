"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half-split as in Llama.

Feature i of the first half and feature i of the second half are a pair, rotated by
position * base^(-2i / head_size). The score of a query and a key then depends on their positions
only through the difference. Angles and the rotation are float32: bfloat16 cannot represent every
position above 256. Frequencies are constants of the program. Angles are traced, because constants
for every position would enlarge the program.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

import models.named as hax
from models.layers.axes import HEAD_SIZE
from models.named import Axis, NamedArray
from models.shape.config import RopeScaling, YarnScaling


def rotary_angles(
    positions: Axis | NamedArray,
    HeadSize: Axis,
    base: float,
    scaling: RopeScaling | YarnScaling | None = None,
) -> NamedArray:
    """Angles in radians, float32 [head_size / 2, ...] with the axes of the integer `positions`.

    An axis stands for its indices.
    """
    Half = HeadSize.resize(HeadSize.size // 2)
    values = frequencies(HeadSize.size, base, scaling).astype(np.float32)
    frequency = hax.named(jnp.asarray(values), Half)
    if isinstance(positions, Axis):
        return frequency.broadcast_to((Half, positions)) * hax.arange(positions, dtype=jnp.float32)
    return frequency.broadcast_to((Half, *positions.axes)) * positions.astype(jnp.float32)


def frequencies(
    size: int, base: float, scaling: RopeScaling | YarnScaling | None = None
) -> np.ndarray:
    """Radians per position, float64 [size / 2]; their only error is the later cast to float32."""
    plain = base ** (-2.0 * np.arange(size // 2) / size)
    if isinstance(scaling, RopeScaling):
        return _llama3(plain, scaling)
    return plain if scaling is None else _yarn(plain, base, scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Interpolate between each frequency and its `factor`-th by the rotations per context."""
    turns = plain * (scaling.original_context / (2 * math.pi))
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    keep = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _yarn(plain: np.ndarray, base: float, scaling: YarnScaling) -> np.ndarray:
    """Interpolate between each frequency and its `factor`-th by the index of its feature pair."""
    size = 2 * len(plain)

    def pair(turns: float) -> float:
        """The fractional index i with base^(2i / size) = wavelength / (2 pi)."""
        wavelength = scaling.original_context / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    # Whole pairs, clamped as in the released code.
    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), size - 1)
    slower = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain * (1.0 - slower + slower / scaling.factor)


def rotate(x: NamedArray, angles: NamedArray, scale: float = 1.0) -> NamedArray:
    """`x` [..., position, ..., head_size] rotated by `angles`, times `scale`; dtype unchanged."""
    HeadSize = x.resolve_axis(HEAD_SIZE)
    half = HeadSize.size // 2
    wide = x.astype(jnp.float32)
    first = wide[HeadSize, :half]
    second = wide[HeadSize, half:]
    cos, sin = hax.cos(angles) * scale, hax.sin(angles) * scale
    rotated = hax.concatenate(HeadSize, [first * cos - second * sin, second * cos + first * sin])
    return rotated.rearrange(x.axes).astype(x.dtype)
