"""The matmul of activations with a matrix, for the two orders of the activations' axes.

Features first, [features, batch, position], is for TPUs. The gradient of a matrix contracts over
all tokens, which TPUs compute with tokens in the last axis; with tokens first, the compiler copies
every wide activation into the other layout in the backward pass.

Tokens first, [batch, position, features], is for all other devices and has a custom backward pass.
JAX's rule reads the cotangent transposed to compute a matrix's gradient. On a CPU the compiler then
fuses the producer of the cotangent (SiLU's derivative, say) into a transposing copy that takes
longer than the matmul. Our rule transposes the narrower of activations and cotangent instead: the
small model of `tests.bench.cpu_training` takes two thirds of the processor time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

import models.named as hax
from models.named import NamedArray


def matmul(x: NamedArray, matrix: NamedArray, axis: str, out: str) -> NamedArray:
    """`x` with `out` in the place of its axis `axis`; these are the only axes of `matrix`."""
    if x.axes[-1].name == axis:
        matrix = matrix.rearrange((axis, out))
        return hax.named(_tokens_first(x.array, matrix.array), (*x.axes[:-1], matrix.axes[-1]))
    y = hax.dot(matrix, x, axis=axis)
    return y.rearrange(tuple(out if a.name == axis else a.name for a in x.axes))


@jax.custom_vjp
def _tokens_first(x: Array, matrix: Array) -> Array:
    """x [..., in] @ matrix [in, out], with the backward pass of the module docstring."""
    return jnp.dot(x, matrix)


def _forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.dot(x, matrix), (x, matrix)


def _backward(residuals: tuple[Array, Array], y_bar: Array) -> tuple[Array, Array]:
    x, matrix = residuals
    x_bar = jnp.einsum("...o,io->...i", y_bar, matrix)
    # Both compute x^T y_bar over all tokens; the narrower operand is the transposed, left one.
    if x.shape[-1] <= y_bar.shape[-1]:
        return x_bar, jnp.einsum("...i,...o->io", x, y_bar)
    return x_bar, jnp.einsum("...o,...i->oi", y_bar, x).T


_tokens_first.defvjp(_forward, _backward)
