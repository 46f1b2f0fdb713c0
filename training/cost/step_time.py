"""Predicts the time of a train step: the counts of `training.cost.step_work` / a chip's rates.

A roofline model of each part. The time of matmuls is the larger of FLOPs / peak and bytes /
bandwidth; that of norms, activations, loss and update is bytes / bandwidth; that of attention is
the larger of its matmuls and its scores, which the vector unit computes at a rate that hardly
depends on the head size. Collectives overlap with computation, except for a share. The larger of
two overlapping times is the 4-norm of both, a smooth maximum. The free parameters and their origin
are in `training.cost.calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.accelerators import TPUS, Chip
from training.cost.step_work import Work

NETWORK = {"v4": 6.25e9, "v5e": 6.25e9, "v5p": 6.25e9, "v6e": 12.5e9, "a100": 25e9}
"""Bytes per second of one chip to other slices or hosts ("How to Scale Your Model", table of chips;
eight 200 Gb/s adapters for eight A100)."""
EXPONENTIALS = {"a100": 2.4e12, "h100": 3.7e12, "h200": 3.7e12, "b200": 4.4e12}
"""Exponentials per second, which limit attention on a GPU: multiprocessors x 16 per clock x boost
clock."""
DEFAULT_NETWORK = 50e9  # eight 400 Gb/s adapters for eight GPUs
HOST_LINK = 16e9
"""Bytes per second between one chip and its host, when several chips share the host's link."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The free parameters, for one chip.

    Attributes:
        matmul: share of the peak that large matmuls reach.
        scores: forward time of one attention score, in units of `score_seconds`.
        streams: share of `Work.stream_bytes` and `Work.logit_bytes` that reaches memory.
        exposed: share of the collectives' time that computation never hides.
        fixed: seconds per step that no other term explains.
    """

    matmul: Any
    scores: Any
    streams: Any
    exposed: Any
    fixed: Any


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one step, by kind of work; `communication` is what computation does not hide."""

    matmul: Any
    head: Any
    attention: Any
    elementwise: Any
    update: Any
    communication: Any
    fixed: Any

    @property
    def total(self) -> Any:
        """Seconds of the step: the sum of all kinds."""
        return sum(vars(self).values())


def times(work: Work, chip: Chip, rates: Rates) -> Times:
    """Predicted seconds of one step, by kind of work."""
    speed = chip.peak * rates.matmul
    matmuls = _larger(work.matmul_flops / speed, work.matmul_bytes / chip.bandwidth)
    head = matmuls * (work.head_flops / work.matmul_flops)
    attention = _larger(work.scores * rates.scores * score_seconds(chip), work.score_flops / speed)
    elementwise = rates.streams * (work.stream_bytes + work.logit_bytes) / chip.bandwidth
    compute = matmuls + attention + elementwise
    return Times(
        matmul=matmuls - head,
        head=head,
        attention=attention,
        elementwise=elementwise,
        update=work.update_bytes / chip.bandwidth + work.update_flops / speed,
        communication=_waiting(work, chip, rates, compute),
        fixed=rates.fixed,
    )


def score_seconds(chip: Chip) -> float:
    """The unit of `Rates.scores`: one exponential on a GPU, 256 FLOPs at peak on a TPU.

    TPUs use the peak because it fits the published rows better than the vector unit's clock.
    """
    return 256 / chip.peak if chip.name in TPUS else 1 / EXPONENTIALS[chip.name]


def _waiting(work: Work, chip: Chip, rates: Rates, compute: Any) -> Any:
    """Seconds of communication that computation does not hide."""
    links = chip.links if chip.name in TPUS else 1
    moved = (work.gathered_bytes + work.activation_bytes) / (chip.link * links)
    moved += work.network_bytes / NETWORK.get(chip.name, DEFAULT_NETWORK)
    moved += work.host_bytes / HOST_LINK
    # Transfers longer than the computation, plus the share that never overlaps.
    return _larger(compute, moved) - compute + rates.exposed * moved


def _larger(one: Any, other: Any) -> Any:
    return (one**4 + other**4) ** 0.25
