"""Described TPU slices: devices to compile for on a machine that has none.

libtpu holds the TPU compiler and can describe any slice. A `Program` built on these devices lowers
and compiles, and runs nowhere.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import Any

from pipeline.errors import InputError

V6E = {
    1: ("1x1", 1),
    4: ("2x2", 1),
    8: ("2x4", 1),
    16: ("4x4", 4),
    32: ("4x8", 8),
    64: ("8x8", 16),
    128: ("8x16", 32),
    256: ("16x16", 64),
}
"""Topology and hosts by chips, as in `pipeline.graph.hardware`, which training does not import."""

HBM_BYTES = {"TPU v6 lite": 31.25 * 2**30}
"""Memory a program may use on one chip, by JAX's `device_kind`, as the compiler states it."""


def describe(slice_name: str) -> list[Any]:
    """Devices of a slice: "v6e-16", or a topology such as "v6e:4x4".

    Sets the environment variables with which libtpu compiles without looking for a TPU; one that
    is set already stays, except the slice's own type.

    Raises:
        InputError: when the name is unknown or libtpu is not installed.
    """
    generation, topology, hosts = _topology(slice_name)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"compiling for {slice_name}: expected the package libtpu, which has the TPU compiler, "
            "and found none; pip install 'ponente[tpu]' (Linux, x86-64)"
        )
    sides = [int(side) for side in topology.split("x")]
    _set_environment(generation, math.prod(sides))
    # Imported late: JAX reads JAX_PLATFORMS when it starts.
    from jax.experimental import topologies

    # libtpu takes a host to have 2x2 chips unless told otherwise.
    bounds = {"chips_per_host_bounds": [*sides, 1, 1][:3]} if hosts == 1 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{generation}:{topology}", **bounds
    )
    return list(described.devices)


def _topology(slice_name: str) -> tuple[str, str, int]:
    """Generation, topology and hosts: "v6e-16" is ("v6e", "4x4", 4)."""
    if match := re.fullmatch(r"(v\d+[a-z]*):([1-9]\d*(?:x[1-9]\d*){1,2})", slice_name):
        chips = math.prod(int(side) for side in match[2].split("x"))
        return match[1], match[2], max(chips // 4, 1)
    match = re.fullmatch(r"v6e-(\d+)", slice_name)
    if match is None or int(match[1]) not in V6E:
        known = ", ".join(f"v6e-{chips}" for chips in V6E)
        raise InputError(
            f"slice: expected one of {known} or a topology such as v6e:4x4, got {slice_name!r}"
        )
    return "v6e", *V6E[int(match[1])]


def _set_environment(generation: str, chips: int) -> None:
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{generation}-{chips}"
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # libtpu locks the machine's TPU for one process; compiling uses none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
