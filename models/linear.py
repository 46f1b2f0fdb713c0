"""A matrix between named axes with an optional bias.

Activations come in one of two orders, and a matmul keeps the order it is given.

Features first, [features, batch, position], is for TPUs. The gradient of a matrix contracts over
all tokens, for which the TPU wants them in the last axis; where matmuls are written tokens first,
the compiler copies every wide activation into the other layout on its way back.

Tokens first, [batch, position, features], is for everything else, with a backward pass of its own:
JAX's rule reads the cotangent across its rows to make a matrix's gradient, and on a CPU the
compiler then fuses what makes the cotangent (SiLU's derivative, say) into a transposing copy that
takes longer than the matmul. Here the narrower of activations and cotangent is read so.
"""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import Array


class Linear(eqx.Module):
    """x @ matrix + bias.

    Attributes:
        matrix: [in axes..., out axes...].
        bias: [out axes...], or None.
    """

    matrix: NamedArray
    bias: NamedArray | None

    def __call__(self, x: NamedArray, axis: str, out: str) -> NamedArray:
        """`x` with its first or last axis `axis` replaced by `out`, in the matrix's dtype.

        Both must be the matrix's only axes, see `flattened`.
        """
        if x.axes[0].name == axis:
            y = hax.dot(self.matrix, x, axis=axis)
        else:
            matrix = self.matrix.rearrange((axis, out))
            axes = (*x.axes[:-1], matrix.axes[-1])
            y = hax.named(_tokens_first(x.rearrange((..., axis)).array, matrix.array), axes)
        return y if self.bias is None else (y + self.bias).rearrange(y.axes)

    def flattened(self, axes: tuple[str, ...], name: str) -> Linear:
        """The same map with `axes` merged into one axis `name`, first one outermost.

        A matmul with one wide axis is laid out densely; one with heads of 64 as its last axis
        is padded to the TPU's 128 lanes, in memory too.
        """

        def flatten(array: NamedArray) -> NamedArray:
            present = tuple(axis for axis in axes if axis in (a.name for a in array.axes))
            return array.flatten_axes(present, name) if present else array

        return Linear(flatten(self.matrix), None if self.bias is None else flatten(self.bias))


def zeros_of(axes: tuple[Axis, ...]) -> NamedArray:
    """A float32 bias as it starts."""
    return hax.zeros(axes)


@jax.custom_vjp
def _tokens_first(x: Array, matrix: Array) -> Array:
    """x [..., in] @ matrix [in, out]."""
    return jnp.dot(x, matrix)


def _forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.dot(x, matrix), (x, matrix)


def _backward(residuals: tuple[Array, Array], y_bar: Array) -> tuple[Array, Array]:
    x, matrix = residuals
    x_bar = jnp.einsum("...o,io->...i", y_bar, matrix)
    if x.shape[-1] <= y_bar.shape[-1]:
        return x_bar, jnp.einsum("...i,...o->io", x, y_bar)
    return x_bar, jnp.einsum("...o,...i->oi", y_bar, x).T


_tokens_first.defvjp(_forward, _backward)
