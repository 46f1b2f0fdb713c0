"""A matrix between named axes with an optional bias."""

from __future__ import annotations

import equinox as eqx

from models.layers.matmul import matmul
from models.named import NamedArray


class Linear(eqx.Module):
    """x @ matrix + bias, with matrix [in axes..., out axes...] and bias [out axes...] or None."""

    matrix: NamedArray
    bias: NamedArray | None

    def __call__(self, x: NamedArray, axis: str, out: str) -> NamedArray:
        """`x` with `out` in the place of its axis `axis`, in the matrix's dtype.

        `axis` and `out` must be the only axes of the matrix, see `flattened`. The order of the axes
        of `x` decides how the product is computed, never what it is.
        """
        y = matmul(x, self.matrix, axis, out)
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
