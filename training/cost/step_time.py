"""How long a train step will take: counts of `training.cost.step_work` over a chip's rates.

A roofline by parts. Matmuls take the longer of their operations and their bytes; norms,
activations, loss and update take their bytes; attention takes its scores, which go through the
vector unit at a rate that hardly depends on the width of a head, or its matmuls. Collectives run
while the chip computes, but for a share. Where two things overlap, a sum of fourth powers stands
for the larger of them. The free numbers are in `training.cost.calibration`, with their origin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.accelerators import TPUS, Chip
from training.cost.step_work import Work

NETWORK = {"v4": 6.25e9, "v5e": 6.25e9, "v5p": 6.25e9, "v6e": 12.5e9, "a100": 25e9}
"""Bytes a second of one chip to other slices or hosts ("How to Scale Your Model", table of chips;
eight 200 Gb/s adapters for eight A100)."""
EXPONENTIALS = {"a100": 2.4e12, "h100": 3.7e12, "h200": 3.7e12, "b200": 4.4e12}
"""A second: multiprocessors x 16 a clock x boost clock; attention on a GPU waits for them."""
DEFAULT_NETWORK = 50e9  # eight 400 Gb/s adapters for eight GPUs
HOST_LINK = 16e9
"""Bytes a second between one chip and its host, as far as several chips share the host's."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The free numbers, for one chip.

    Attributes:
        matmul: share of the peak that large matmuls reach.
        scores: time of one attention score, forward, in units of `score_seconds`.
        streams: bytes of `Work.stream_bytes` and `logit_bytes` that reach memory, as a share.
        exposed: share of the collectives' time in which the chip waits.
        fixed: seconds of a step that nothing above explains.
    """

    matmul: Any
    scores: Any
    streams: Any
    exposed: Any
    fixed: Any


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one step, by what they are spent on."""

    matmul: Any
    head: Any
    attention: Any
    elementwise: Any
    update: Any
    communication: Any
    fixed: Any

    @property
    def total(self) -> Any:
        """All of them; overlapped communication is not among them."""
        return (
            self.matmul
            + self.head
            + self.attention
            + self.elementwise
            + self.update
            + self.communication
            + self.fixed
        )


def times(work: Work, chip: Chip, rates: Rates) -> Times:
    """Seconds of the parts of one step."""
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
        update=work.update_bytes / chip.bandwidth,
        communication=_waiting(work, chip, rates, compute),
        fixed=rates.fixed,
    )


def score_seconds(chip: Chip) -> float:
    """The unit of `Rates.scores`: an exponential of a GPU; of a TPU 256 operations of its peak, as
    published rows agree with its peak better than with the clock of its vector unit."""
    return 256 / chip.peak if chip.name in TPUS else 1 / EXPONENTIALS[chip.name]


def _waiting(work: Work, chip: Chip, rates: Rates, compute: Any) -> Any:
    """Seconds of communication that computation does not hide."""
    links = chip.links if chip.name in TPUS else 1
    moved = (work.gathered_bytes + work.activation_bytes) / (chip.link * links)
    moved += work.network_bytes / NETWORK.get(chip.name, DEFAULT_NETWORK)
    moved += work.host_bytes / HOST_LINK
    return _larger(compute, moved) - compute + rates.exposed * moved


def _larger(one: Any, other: Any) -> Any:
    return (one**4 + other**4) ** 0.25
