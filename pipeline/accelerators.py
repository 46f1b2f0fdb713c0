"""The supported chips: one table for pods, memory, MFU and doctor. Peaks are dense bfloat16.

JAX has one device for each chip, and for v7x one for each half: all figures are of a device.

Sources: cloud.google.com/tpu/docs (each generation), "How to Scale Your Model" (jax-ml.github.io/
scaling-book) for link bandwidths, NVIDIA's data sheets, and for usable memory the error of libtpu
0.0.42.1 when a program does not fit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_GIB = 2.0**30
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SMALL_CUBES = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"]
_CUBES: dict[int, str] = {4 << doublings: name for doublings, name in enumerate(_SMALL_CUBES)}
# Ray's table of topologies has neither Google's largest v4-4096 (8x16x16) nor all of v7x.
_V7X_CUBES = _CUBES | {2048: "8x16x16"}
_V5P_CUBES = _V7X_CUBES | {4096: "16x16x16", 6144: "16x16x24"}
_CHIPS_PER_HOST = 4
# Generations with flat slices have machine types with 1, 4 and 8 chips.
_MOST_ON_ONE_HOST = 8


@dataclass(frozen=True)
class Chip:
    """One kind of chip, as its devices in JAX."""

    name: str  # as in `pod("v6e-16")` or `pod("8xh100")`
    device_kinds: tuple[str, ...]  # JAX's names of it (`device_kind`); for a GPU, prefixes of them
    peak: float  # dense bfloat16 FLOP/s
    memory: float  # bytes
    bandwidth: float  # bytes per second of that memory
    link: float  # bytes per second, one way, of one link to another chip, or of all NVLinks
    usable: float | None = None  # bytes for a program, by the TPU compiler; None if not measured

    @property
    def links(self) -> int:
        """To other chips in the same slice or host."""
        return 1

    @property
    def ray_type(self) -> str:
        """Ray's name of it, in the resource `accelerator_type:<name>`."""
        return self.name.upper()


@dataclass(frozen=True)
class Tpu(Chip):
    """A TPU generation."""

    topologies: dict[int, str] = field(default_factory=dict, repr=False)  # by a slice's chips
    devices: int = 1  # of one chip

    @property
    def google_name(self) -> str:
        """In accelerator types such as v5litepod-16 and in Ray's labels."""
        return {"v5e": "v5litepod", "v7x": "tpu7x"}.get(self.name, self.name)

    @property
    def chip_config(self) -> str:
        """libtpu's setting that makes one chip one device; otherwise v4 has one per core."""
        return "megacore" if self.name == "v4" else "default"

    @property
    def flat(self) -> bool:
        """Whether its slices are tori of two dimensions, and not of three."""
        return self.topologies == _FLAT

    @property
    def links(self) -> int:
        return 4 if self.flat else 6

    @property
    def cores(self) -> int:
        """Per chip; the number in a slice's name counts cores."""
        return 1 if self.flat else 2

    @property
    def ray_type(self) -> str:
        return f"TPU-{self.ray_name.upper()}"

    @property
    def ray_name(self) -> str:
        """Ray's spelling of Google's name: tpu7x is v7x."""
        return self.google_name.replace("tpu", "v")

    def hosts(self, chips: int) -> int:
        whole = self.flat and chips <= _MOST_ON_ONE_HOST
        return 1 if whole else math.ceil(chips / _CHIPS_PER_HOST)

    @property
    def names(self) -> dict[str, int]:
        return {f"{self.name}-{chips * self.cores}": chips for chips in self.topologies}


_TPUS = (
    Tpu("v4", ("TPU v4",), 275e12, 32 * _GIB, 1228e9, 45e9, 30.75 * _GIB, _CUBES),
    Tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * _GIB, 819e9, 45e9, 15.75 * _GIB, _FLAT),
    # Google's 95 GiB is rounded: libtpu gives programs more.
    Tpu("v5p", ("TPU v5", "TPU v5p"), 459e12, 96 * _GIB, 2765e9, 90e9, 95.74 * _GIB, _V5P_CUBES),
    Tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * _GIB, 1600e9, 90e9, 31.25 * _GIB, _FLAT),
    # The halves of a chip share its links, which are v5p's.
    Tpu("v7x", ("TPU7x",), 2307e12 / 2, 96 * _GIB, 7380e9 / 2, 45e9, 94.74 * _GIB, _V7X_CUBES, 2),
)
_GPUS = (
    Chip("a100", ("NVIDIA A100",), 312e12, 80e9, 2039e9, 300e9),
    Chip("h100", ("NVIDIA H100",), 989.4e12, 80e9, 3350e9, 450e9),
    Chip("h200", ("NVIDIA H200",), 989.4e12, 141e9, 4800e9, 450e9),
    Chip("b200", ("NVIDIA B200",), 2250e12, 180e9, 8000e9, 900e9),
)
TPUS = {tpu.name: tpu for tpu in _TPUS}
GPUS = {gpu.name: gpu for gpu in _GPUS}
# Variants of the GPUs above with a lower peak, by name prefix.
_OTHER_PEAKS = {
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200 NVL": 835.5e12,
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip with this JAX device kind; None for one that is not in the table.

    A TPU's name must match exactly, as "TPU v5 lite" begins with "TPU v5". A GPU's name matches the
    longest entry that is a prefix of it and ends at a word boundary.
    """
    for tpu in TPUS.values():
        if device_kind in tpu.device_kinds:
            return tpu
    gpus = {kind: gpu for gpu in GPUS.values() for kind in gpu.device_kinds}
    return gpus.get(_longest(device_kind, gpus))


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s; None where it is not known."""
    if other := _longest(device_kind, _OTHER_PEAKS):
        return _OTHER_PEAKS[other]
    chip = chip_of(device_kind)
    return chip.peak if chip is not None else None


def _longest(device_kind: str, kinds: dict[str, Chip] | dict[str, float]) -> str:
    fitting = (
        kind
        for kind in kinds
        if device_kind.startswith(kind) and not device_kind[len(kind) :][:1].isalnum()
    )
    return max(fitting, key=len, default="")


@dataclass(frozen=True)
class Slices:
    """One or more TPU slices of one size; several are joined by the data-centre network."""

    tpu: Tpu
    chips: int
    count: int = 1


def find_slices(name: str) -> Slices | None:
    """The slices that a name such as v6e-16 or 2xv6e-16 stands for; None for any other name."""
    several = re.fullmatch(r"([2-9]|[1-9]\d{1,2})x(v.+)", name)
    one = several[2] if several else name
    tpu = TPUS.get(one.partition("-")[0])
    if tpu is None or one not in tpu.names:
        return None
    return Slices(tpu, tpu.names[one], int(several[1]) if several else 1)
