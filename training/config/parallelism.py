"""How a run is sharded over devices, as plain data.

A rule is (named axis, mesh axes). The rules are tried in order for each array: a rule applies when
the array has the named axis, no earlier rule split that axis or used one of the mesh axes, and the
axis size is divisible by the number of devices along them. Mesh axes of size 1 are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from models.shape.validation import Count, check_fields
from pipeline.errors import InputError

DATA, FSDP, SEQUENCE, TENSOR = MESH_AXES = ("data", "fsdp", "sequence", "tensor")
Rule = tuple[str, tuple[str, ...]]
Rules = tuple[Rule, ...]

_TENSOR_PARALLEL: Rules = tuple(
    (name, (TENSOR,)) for name in ("kv_heads", "query_features", "kv_features", "mlp", "vocab")
)


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """The sharding of arrays; the trained model does not depend on it.

    Attributes:
        activations: rules of activations. "batch" and "position" split the tokens, "kv_heads" the
            attention kernels.
        compute_params: rules of parameters while layers multiply them.
        params: rules of float32 parameters, their EMA and their gradients between steps.
        optimizer_state: rules of moments; None for the rules of `params`.
    """

    activations: Rules = (("batch", (DATA, FSDP)), ("position", (SEQUENCE,)), *_TENSOR_PARALLEL)
    compute_params: Rules = _TENSOR_PARALLEL
    params: Rules = (*_TENSOR_PARALLEL, ("vocab", (FSDP,)), ("embed", (FSDP,)))
    optimizer_state: Rules | None = None

    def __post_init__(self) -> None:
        for name, rules in vars(self).items():
            found = None if rules is None else _checked(name, rules)
            object.__setattr__(self, name, found)
        shared = {*self.axes("kv_heads")} & {*self.axes("position"), *self.axes("batch")}
        if shared:
            raise InputError(
                f"AxisRules.activations: kv_heads and the tokens share {', '.join(sorted(shared))}"
                "; give each mesh axis to one of batch, position and kv_heads"
            )

    def axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes that split a named axis of activations."""
        return dict(self.activations).get(name, ())

    @property
    def splits_tables(self) -> bool:
        """Whether embedding and head stay split over the devices of a group during matmuls."""
        batch = {*self.axes("batch")}
        return any(name == "vocab" and batch & {*axes} for name, axes in self.compute_params)


def _checked(field: str, rules: object) -> Rules:
    """The rules as tuples, also from JSON."""
    try:
        found = msgspec.convert(rules, Rules)
    except msgspec.ValidationError:
        found = None
    if found is None or not all(axes and {*axes} <= {*MESH_AXES} for _, axes in found):
        raise InputError(
            f"AxisRules.{field}: expected named axes, each with mesh axes out of "
            f"{', '.join(MESH_AXES)}, such as (('embed', ('fsdp',)),), found {rules!r}"
        )
    return found


SPLIT_TABLES = AxisRules(compute_params=(*_TENSOR_PARALLEL, ("vocab", (FSDP,))))
"""Keeps embedding and head split: a group all-gathers ids and hidden states instead of the tables,
chunk by chunk. Saves memory if the vocabulary is large compared with the tokens of a group, and
communicates more if it is not."""


def assign(
    axes: Mapping[str, int], rules: Rules, mesh: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split each named axis of an array, by size; unsplit axes are left out.

    `rules` are tried in order; `mesh` has the number of devices along each mesh axis. Raises
    `InputError` where an axis that a rule names is not divisible, and no other rule uses its mesh
    axes.
    """
    found: dict[str, tuple[str, ...]] = {}
    refused: dict[str, tuple[tuple[str, ...], int]] = {}
    for name, wanted in rules:
        over = tuple(axis for axis in wanted if mesh[axis] > 1)
        used = {axis for taken in found.values() for axis in taken}
        if name not in axes or name in found or not over or used & {*over}:
            continue
        devices = math.prod(mesh[axis] for axis in over)
        if axes[name] % devices:
            refused[name] = over, devices
        else:
            found[name] = over
    used = {axis for taken in found.values() for axis in taken}
    for name, (over, devices) in refused.items():
        if not {*over} <= used:
            field = "group" if FSDP in over else "/".join(over)
            advice = "choose a number that divides it"
            if name == "vocab":  # its number is the tokenizer's
                advice = f"set TransformerConfig.vocab_multiple to {devices}"
            raise InputError(
                f"Parallelism.{field}: {name} {axes[name]} is not divisible by the {devices} "
                f"devices that share it; {advice}"
            )
    return found


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
        sums: dtype in which gradients of tables are summed over devices: "compute" (the compute
            dtype, on a CPU float32) or "float32", which sends twice the bytes. Each device adds up
            its own tokens and microbatches in float32 in any case.
        reduce: how often devices add up the gradients of several microbatches: of each
            "microbatch", once a "step" (every device then holds a whole float32 gradient, and the
            sum is float32; not with "fsdp", nor where devices share a sequence or matrices) or
            "auto": once a step if it fits, but of each microbatch in one slice of TPUs, where that
            is hidden behind matmuls.
    """

    sharding: Sharding = "auto"
    group: Count | Literal["all"] = "all"
    sequence: Count = 1
    tensor: Count = 1
    rules: AxisRules = AxisRules()
    optimizer_memory: Literal["auto", "device", "host"] = "auto"
    sums: Literal["compute", "float32"] = "compute"
    reduce: Literal["auto", "step", "microbatch"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reduce == "step" and self.sharding != "auto" and not self.can_reduce_once:
            raise InputError(
                'Parallelism.reduce: "step" needs devices that can each hold a whole gradient of '
                'their own sequences: sharding "replicated" or "zero1", sequence 1, tensor 1 and '
                'tables that are not split; change these or choose "auto"'
            )

    @property
    def can_reduce_once(self) -> bool:
        """Whether each device may hold a whole gradient of its own sequences, see `reduce`."""
        rules, whole = self.rules, self.sequence == self.tensor == 1
        alone = whole and {*rules.axes("batch")} == {DATA, FSDP} and not rules.splits_tables
        return alone and self.sharding in ("replicated", "zero1")

    @property
    def splits_state(self) -> bool:
        """Whether parameters and optimizer state are split between steps."""
        return self.sharding in ("zero1", "fsdp")

    def within_slices(self, devices: int, slices: int) -> Parallelism:
        """The same parallelism with a `group` within one slice: only "data" spans slices."""
        if slices == 1:
            return self
        try:
            _, group, _, _ = self.mesh_shape(devices // slices)
        except InputError as error:
            raise InputError(f"each of {slices} slices: {error}") from None
        return replace(self, group=group) if self.splits_state else self

    def mesh_shape(self, devices: int) -> tuple[int, int, int, int]:
        """Sizes of the mesh axes data, fsdp, sequence and tensor."""
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
