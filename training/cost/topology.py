"""Describes TPU slices: devices to compile for on a machine without TPUs.

libtpu contains the TPU compiler and can describe any slice. A `Program` built on these devices can
be lowered and compiled, but not run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import TYPE_CHECKING

from pipeline.accelerators import TPUS, Slices, find_slices
from pipeline.errors import InputError

if TYPE_CHECKING:
    import jax


def describe(slice_name: str) -> list[jax.Device]:
    """Devices of one or several slices: "v6e-16", "2xv6e-16", or a topology such as "v6e:4x4".

    Sets the environment variables that let libtpu compile without a TPU. Variables that are already
    set stay, except TPU_ACCELERATOR_TYPE.

    Raises:
        InputError: the name is unknown or libtpu is not installed.
    """
    found, topology = _topology(slice_name)
    tpu = found.tpu
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"compiling for {slice_name}: expected the package libtpu, which has the TPU compiler, "
            "and found none; pip install 'ponente[tpu]' (Linux, x86-64)"
        )
    sides = [int(side) for side in topology.split("x")]
    _set_environment(f"{tpu.google_name}-{math.prod(sides) * tpu.cores}")
    # Imported after the environment is set, because JAX reads JAX_PLATFORMS at import.
    from jax.experimental import topologies

    # libtpu assumes 2x2 chips per host unless it is given other bounds.
    one_host = tpu.hosts(found.chips) == 1
    bounds = {"chips_per_host_bounds": [*sides, 1, 1][:3]} if one_host else {}
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{tpu.name}:{topology}",
        chip_config_name=tpu.chip_config,
        num_slices=found.count,
        **bounds,
    )
    return list(described.devices)


def compiler_versions() -> dict[str, str | None]:
    """Versions of jax and libtpu; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(("jax", "libtpu"))
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _topology(slice_name: str) -> tuple[Slices, str]:
    """The slices that a name denotes, and the topology of one slice: "v6e-16" has "4x4"."""
    if match := re.fullmatch(r"(v\d+[a-z]*):([1-9]\d*(?:x[1-9]\d*){1,2})", slice_name):
        tpu, chips = TPUS.get(match[1]), math.prod(int(side) for side in match[2].split("x"))
        if tpu is not None:
            return Slices(tpu, chips), match[2]
    elif (found := find_slices(slice_name)) is not None:
        return found, found.tpu.topologies[found.chips]
    known = ", ".join(TPUS["v6e"].names)
    raise InputError(
        f"slice: expected one of {known}, such a slice of {', '.join(TPUS)}, several such as "
        f"2xv6e-16, or a topology such as v6e:4x4; got {slice_name!r}"
    )


def _set_environment(accelerator_type: str) -> None:
    os.environ["TPU_ACCELERATOR_TYPE"] = accelerator_type
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # libtpu locks the machine's TPU for one process, but compiling does not use the TPU.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
