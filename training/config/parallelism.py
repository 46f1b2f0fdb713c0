"""How a run is sharded over devices, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from models.shape.validation import Count, check_fields
from pipeline.errors import InputError
from training.config.axis_rules import AxisRules

Sharding = Literal["auto", "replicated", "zero1", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The division of a run over devices; the trained model does not depend on it.

    The batch is always split into devices / (sequence x tensor) shards.

    Attributes:
        sharding: "replicated" (every device has the whole state), "zero1" (parameters and optimizer
            state are split, and a copy in the compute dtype is gathered once a step;
            https://arxiv.org/abs/1910.02054, stage 1), "fsdp" (gathered layer by layer, twice a
            step; stage 3) or "auto" (the first of these that fits the memory).
        group: number of devices that share one copy of a split state; "all" for all of a slice.
        sequence: number of devices that split the positions of a sequence.
        tensor: number of devices that split heads, MLP and vocabulary.
        rules: logical axis rules of the mesh.
        optimizer_memory: memory of the optimizer state between steps: "device", "host" (a step
            copies it to the device; https://arxiv.org/abs/2101.06840) or "auto" (the device,
            unless nothing fits).
    """

    sharding: Sharding = "auto"
    group: Count | Literal["all"] = "all"
    sequence: Count = 1
    tensor: Count = 1
    rules: AxisRules = AxisRules()
    optimizer_memory: Literal["auto", "device", "host"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def splits_state(self) -> bool:
        """Whether parameters and optimizer state are split between steps."""
        return self.sharding in ("zero1", "fsdp")

    def within_slices(self, devices: int, slices: int) -> Parallelism:
        """The same parallelism with a `group` within one slice: only "data" spans slices.

        Raises:
            InputError: the sizes do not divide the devices of one slice.
        """
        if slices == 1:
            return self
        try:
            _, group, _, _ = self.mesh_shape(devices // slices)
        except InputError as error:
            raise InputError(f"each of {slices} slices: {error}") from None
        return replace(self, group=group) if self.splits_state else self

    def mesh_shape(self, devices: int) -> tuple[int, int, int, int]:
        """Sizes of the mesh axes data, fsdp, sequence and tensor.

        Raises:
            InputError: the sizes do not divide the number of devices.
        """
        inner = self.sequence * self.tensor
        if devices % inner:
            raise InputError(
                f"Parallelism: {devices} devices are not divisible by sequence {self.sequence} x "
                f"tensor {self.tensor}; choose sizes whose product divides the devices"
            )
        rows = devices // inner
        group = (rows if self.group == "all" else self.group) if self.splits_state else 1
        if rows % group:
            raise InputError(
                f"Parallelism.group: {rows} devices are not divisible by a group of {group}; "
                'choose one that divides them, or "all"'
            )
        return rows // group, group, self.sequence, self.tensor
