"""Which mesh axes divide the activations, for the code that is written per device.

Most of the model is partitioned by the compiler from axis names alone. Two parts are not: kernels,
which the compiler cannot partition, and the loss, whose sum over chunks it would reduce over the
devices once a chunk instead of once.
"""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh and what is spread over which of its axes.

    Attributes:
        mesh: the devices.
        batch: mesh axes that divide "batch".
        heads: mesh axes that divide "kv_heads" (and the MLP and the vocabulary).
        sequence: mesh axes that divide "position".
    """

    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """Of the devices: "tpu", "gpu" or "cpu"."""
        return self.mesh.devices.flat[0].platform

    def shards(self, axes: tuple[str, ...]) -> int:
        """Into how many pieces `axes` of the mesh divide something."""
        return math.prod(self.mesh.shape[name] for name in axes)
