"""The table of chips: names of slices, hosts and peaks, and the same by Ray's own table."""

from __future__ import annotations

import math

import pytest
from ray._private.accelerators import tpu as rays
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.util import accelerators as rays_types

from pipeline import InputError, pod
from pipeline.accelerators import GPUS, TPUS, chip_of, peak_flops
from tests.tpu_compiler import needs_libtpu, printed

SLICES = [(tpu, name) for tpu in TPUS.values() for name in tpu.names]


@pytest.mark.parametrize(("tpu", "name"), SLICES, ids=[name for _, name in SLICES])
def test_every_slice_is_one_that_ray_knows(tpu, name):
    """Its topology exists, with as many chips on a host, and its name is Google's."""
    asked = pod(name)
    assert (asked.kind, asked.generation) == ("tpu", tpu.name)
    ray_name = rays.normalize_tpu_accelerator_type(tpu.google_name)
    assert ray_name == tpu.ray_name
    assert asked.topology in rays.VALID_TPU_TOPOLOGY[ray_name]
    assert asked.chips == math.prod(int(side) for side in asked.topology.split("x"))
    assert asked.chips_per_process == rays.get_chips_per_host(asked.topology, ray_name)
    assert asked.chips == asked.processes * asked.chips_per_process
    assert asked.devices == asked.chips * tpu.devices
    called = rays.infer_tpu_pod_type_from_topology(asked.topology, ray_name)
    assert called == name.replace(tpu.name, ray_name)


def test_several_slices_are_as_many_times_one():
    """Hosts and devices are counted over all of them; a slice keeps its shape and its name."""
    one, three = pod("v5e-16"), pod("3xv5e-16")
    assert (three.slices, three.slice_name) == (3, "v5e-16")
    assert (three.processes, three.devices) == (3 * one.processes, 3 * one.devices)
    assert (three.topology, three.hosts_per_slice) == (one.topology, one.processes)
    for name in ("1xv5e-16", "0xv5e-16", "02xv5e-16", "2x3xv5e-16", "2xv5e-17", "2xv5e"):
        with pytest.raises(InputError, match="hardware: expected"):
            pod(name)


def test_chips_have_the_names_that_ray_gives_them():
    """A GPU's is what Ray makes of the name that the driver reports."""
    for tpu in TPUS.values():
        assert tpu.ray_type == getattr(rays_types, f"GOOGLE_TPU_{tpu.ray_name.upper()}")
    reported = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200")
    for name, gpu in zip(reported, GPUS.values(), strict=True):
        assert chip_of(name) is gpu
        assert NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name) == gpu.ray_type


DESCRIBE = """
import json
from pipeline.accelerators import TPUS
from training.preflight import describe
slices = {name: describe(name) for tpu in TPUS.values() for name in tpu.names}
print(json.dumps({name: [len(found), found[-1].process_index + 1, found[0].device_kind]
                  for name, found in slices.items()}))
"""


@pytest.mark.slow
@needs_libtpu
def test_every_slice_is_one_that_the_tpu_compiler_knows():
    """One device a chip, v4's two cores included, two of v7x; as many hosts; the chip's name."""
    found = printed("-c", DESCRIBE)[-1]
    for tpu, name in SLICES:
        devices, hosts, kind = found[name]
        assert (devices, hosts) == (pod(name).devices, pod(name).processes), name
        assert chip_of(kind) is tpu


def test_the_number_of_a_slice_counts_cores_where_google_counts_them():
    """v5p-8 is four chips on one host; v6e-8 is eight on one, v6e-16 sixteen on four.

    v7x-8 is four chips on one host, with eight devices.
    """
    known = {"v4-16": (8, 2), "v5p-8": (4, 1), "v6e-8": (8, 1), "v5e-16": (16, 4), "v7x-8": (8, 1)}
    assert {name: (pod(name).devices, pod(name).processes) for name in known} == known
    several = pod("2xv7x-16")
    assert (several.chips, several.devices, several.processes) == (16, 32, 4)
    assert (several.chips_per_process, several.devices_per_process) == (4, 8)


def test_gpus_of_one_host_and_of_several():
    one, two = pod("8xh100"), pod("2x8xb200")
    assert (one.kind, one.generation, one.processes, one.devices) == ("gpu", "h100", 1, 8)
    assert (two.generation, two.processes, two.devices_per_process) == ("b200", 2, 8)


def test_the_largest_slice_of_each_generation_has_a_name():
    """v5p's has 6,144 chips, by Google's table of its configurations."""
    largest = {tpu.name: max(tpu.topologies.items()) for tpu in TPUS.values()}
    flat, v4, v5p, v7x = (256, "16x16"), (1024, "8x8x16"), (6144, "16x16x24"), (2048, "8x16x16")
    assert largest == {"v4": v4, "v5e": flat, "v5p": v5p, "v6e": flat, "v7x": v7x}
    assert (pod("v5p-12288").processes, pod("v5p-4096").topology) == (1536, "8x16x16")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v6e-3", "v6e-1, v6e-4, v6e-8, v6e-16"),
        ("v5p-4", "v5p-8, v5p-16"),
        ("v7-8", "v4-32, v5e-16, v5p-32, v6e-16"),
        ("8xh800", "8xa100, 8xh100, 8xh200, 8xb200"),
        ("0xh100", "GPUs of a host"),
        ("2x0xh100", "GPUs of a host"),
        ("h100", "GPUs of a host"),
        ("cpu-0x2", "cpu-<processes>x<devices>"),
    ],
)
def test_other_names_are_refused_with_those_there_are(name, known):
    with pytest.raises(InputError, match="hardware: expected") as refused:
        pod(name)
    assert known in str(refused.value)


def test_peaks():
    """Devices by JAX's name; anything else has no peak rather than a wrong one."""
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == peak_flops("TPU v5p") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989.4e12
    assert (peak_flops("TPU v4"), peak_flops("NVIDIA B200")) == (275e12, 2250e12)
    assert peak_flops("TPU7x") == 2307e12 / 2  # half a chip
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    for unknown in ("cpu", "TPU v4 lite", "TPU v7", "NVIDIA A10", "NVIDIA H1000", "H100"):
        assert peak_flops(unknown) is None


def test_chips_by_the_name_that_jax_gives_them():
    for chip in (*TPUS.values(), *GPUS.values()):
        assert all(chip_of(kind) is chip for kind in chip.device_kinds)
    assert chip_of("cpu") is None
    assert all(tpu.usable is not None and tpu.usable < tpu.memory for tpu in TPUS.values())
