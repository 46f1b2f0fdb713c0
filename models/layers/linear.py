"""A matrix between named axes with an optional bias.

Activations have one of two axis orders, and a matmul keeps the order of its input.

Features first, [features, batch, position], is for TPUs. The gradient of a matrix contracts over
all tokens, which TPUs compute with tokens in the last axis; with tokens first, the compiler copies
every wide activation into the other layout in the backward pass.

Tokens first, [batch, position, features], is for all other devices and has a custom backward pass.
JAX's rule reads the cotangent transposed to compute a matrix's gradient. On a CPU the compiler then
fuses the producer of the cotangent (SiLU's derivative, say) into a transposing copy that takes
longer than the matmul. Our rule transposes the narrower of activations and cotangent instead.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import models.named as hax
from models.named import NamedArray


class Linear(eqx.Module):
    """x @ matrix + bias.

    Attributes:
        matrix: [in axes..., out axes...].
        bias: [out axes...], or None.
    """

    matrix: NamedArray
    bias: NamedArray | None

    def __call__(self, x: NamedArray, axis: str, out: str) -> NamedArray:
        """`x` with `out` in the place of its axis `axis`, in the matrix's dtype.

        `axis` and `out` must be the only axes of the matrix, see `flattened`. The order of the axes
        of `x` decides how the product is computed, never what it is.
        """
        if x.axes[-1].name == axis:
            matrix = self.matrix.rearrange((axis, out))
            axes = (*x.axes[:-1], matrix.axes[-1])
            y = hax.named(_tokens_first(x.array, matrix.array), axes)
        else:
            y = hax.dot(self.matrix, x, axis=axis)
            y = y.rearrange(tuple(out if a.name == axis else a.name for a in x.axes))
        return y if self.bias is None else (y + self.bias).rearrange(y.axes)

    def flattened(self, axes: tuple[str, ...], name: str) -> Linear:
        """The same linear map with `axes` merged into one axis `name`, the first one outermost.

        A matmul with one wide axis is stored densely; with heads of 64 as the last axis it is
        padded to the TPU's 128 lanes, in memory too.
        """

        def flatten(array: NamedArray) -> NamedArray:
            present = tuple(axis for axis in axes if axis in (a.name for a in array.axes))
            return array.flatten_axes(present, name) if present else array

        return Linear(flatten(self.matrix), None if self.bias is None else flatten(self.bias))


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
