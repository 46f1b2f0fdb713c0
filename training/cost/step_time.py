"""Predicts the time of a train step: the counts of `training.cost.step_work` / a chip's rates.

A roofline model of each part. The time of matmuls is the larger of FLOPs / peak and bytes /
bandwidth; that of norms, activations and update is bytes / bandwidth; that of attention is the
larger of its matmuls and its scores, which the vector unit computes at a rate that hardly depends
on the head size; that of the loss is the larger of bytes / bandwidth and its logits, which a TPU's
vector unit computes like scores. Collectives overlap with computation, except for a share; on TPUs
each doubling of the chips adds a time to every step. The larger of two overlapping times is the
4-norm of both, a smooth maximum. Imports no JAX.

The free parameters (`rates`) were fitted on 2026-11-27 by `python -m tests.bench.predictions` to
155 published rows of 8 sources; docs/predictions.md has every row with its error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from models.shape.footprint import training_flops_per_token
from pipeline.accelerators import TPUS, Chip
from training.cost.attention import cycles_over_splash
from training.cost.executed_flops import orthogonalization_flops
from training.cost.memory_estimate import optimizer_bytes, own_matrices
from training.cost.resolved_run import ResolvedPhase
from training.cost.step_work import StepShape, Work, work

NETWORK = {**dict.fromkeys(("v4", "v5e", "v5p", "v7x"), 6.25e9), "v6e": 12.5e9, "a100": 25e9}
"""Bytes per second of one device to other slices or hosts ("How to Scale Your Model", table of
chips; eight 200 Gb/s adapters for eight A100; 100 Gb/s a chip of v7x by Google)."""
EXPONENTIALS = {"a100": 2.4e12, "h100": 3.7e12, "h200": 3.7e12, "b200": 4.4e12}
"""Exponentials per second, which limit attention on a GPU: multiprocessors x 16 per clock x boost
clock."""
SLOWER = {"triton": 1.5, "blockwise": 4.0}
"""Predicted time of attention on a GPU / that of cuDNN's kernels, from whole steps of `llama_200m`
on an H200 (docs/gpus.md); no published row has them."""
DEFAULT_NETWORK = 50e9  # eight 400 Gb/s adapters for eight GPUs
HOST_LINK = 16e9
"""Bytes per second between one chip and its host, when several chips share the host's link."""

CPU = "cpu"
_CORE = (40e9, 5e9)
"""A guess at the peak and bandwidth of a CPU's core in float32, which a store's runs correct."""

ROWS = 155
ERROR, ERROR_90 = 0.102, 0.273
"""Median and 90th percentile of the absolute relative error, with each row's source left out of the
fit."""
RANGES = {
    ("below 350M", "1 chip"): (0.80, 1.21),
    ("below 350M", "2 to 8 chips"): (0.80, 1.31),
    ("below 350M", "more chips"): (0.80, 2.46),
    ("350M and more", "1 chip"): (0.80, 1.21),
    ("350M and more", "2 to 8 chips"): (0.80, 1.19),
    ("350M and more", "more chips"): (0.80, 1.18),
}
"""10th and 90th percentile of published / predicted time by `size_class`, untuned runs included. A
class of fewer than 20 runs is at least as wide as all runs together."""
GUESSED = (0.15, 7.0)
"""The same for a CPU, of which no row is published: a guess at a guess."""
UNTUNED = (2.2, 2.6)
"""Least and largest published / predicted time of the untuned runs."""
MATMUL = {
    **{"v4": 0.732, "v5e": 0.780, "v5p": 0.748, "v6e": 0.721, "v7x": 0.762},
    **{"a100": 0.654, "h100": 0.503},
}
"""Share of the peak that large matmuls reach, by chip."""
_SAME = {"h200": "h100"}  # the same multiprocessors
_FAMILY = 0.572  # GPUs without published rows

KINDS = ["matmul", "head", "attention", "elementwise", "update", "communication", "fixed"]
"""Kinds of work whose times add up to a step; "elementwise" has the loss, "communication" is what
computation does not hide, "fixed" depends on the number of chips alone."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The free parameters, for one chip.

    Attributes:
        matmul: share of the peak that large matmuls reach.
        scores: forward time of one attention score, in units of `score_seconds`.
        streams: share of `Work.stream_bytes` and of 12 bytes a logit that reaches memory.
        logits: time of a logit in the loss, in units of `score_seconds`; 0 where only bytes count.
        exposed: share of the collectives' time that computation never hides.
        fixed: seconds of every step, and `doubling` those that each doubling of the chips adds.
    """

    matmul: Any
    scores: Any
    streams: Any
    logits: Any
    exposed: Any
    fixed: Any
    doubling: Any


def cpu(devices: int, cores: int) -> Chip:
    """One of the devices that share a machine's cores."""
    peak, bandwidth = (cores / devices * rate for rate in _CORE)
    rates = {"peak": peak, "bandwidth": bandwidth, "link": bandwidth}
    return Chip(name=CPU, device_kinds=(CPU,), memory=0.0, **rates)


def rates(chip: Chip) -> Rates:
    """The fitted parameters for a chip, or for its family where no published row has the chip."""
    tpu = chip.name in TPUS
    return Rates(
        matmul=MATMUL.get(_SAME.get(chip.name, chip.name), _FAMILY),
        scores=7.425 if tpu else 1.0 if chip.name == CPU else 10.83,
        streams=0.940 if tpu else 1.037,
        logits=32.5 if tpu else 0.0,
        exposed=0.131,
        fixed=0.0102 if chip.name != CPU else 0.001,
        doubling=0.0111 if tpu else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted step: its seconds by kind of work, and the `tokens` of all devices.

    `mfu` is of causal attention, `mfu_full` of attention over all pairs; `ratios` are the ends of
    the 80 % interval / the predicted time, of `RANGES`.
    """

    times: dict[str, float]
    tokens: int
    mfu: float
    mfu_full: float
    ratios: tuple[float, float]

    @property
    def seconds(self) -> float:
        return sum(self.times.values())

    @property
    def range(self) -> tuple[float, float]:
        """80 % interval of the step's seconds, from the published runs of its `size_class`."""
        return self.seconds * self.ratios[0], self.seconds * self.ratios[1]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step's time by kind of work, the largest first."""
        found = {kind: seconds / self.seconds for kind, seconds in self.times.items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def forecast(run: ResolvedPhase, chip: Chip) -> Forecast:
    model, optimizer, train, devices = run.model, run.optimizer, run.train, run.devices.count
    _, group, sequence, tensor = train.parallel.mesh_shape(devices)
    own = own_matrices(model, optimizer, group * tensor).items()
    job = StepShape(
        model=model,
        rows=train.batch_size / devices,
        sequence_length=train.sequence_length,
        chips=devices,
        group=group,
        sharding=train.parallel.sharding,
        sequence=sequence,
        tensor=tensor,
        slices=run.devices.slices,
        per_host=run.devices.per_host,
        microbatches=train.microbatches,
        remat=train.remat,
        state_bytes=optimizer_bytes(model, optimizer) / model.parameter_count,
        update_flops=orthogonalization_flops(model, optimizer, group * tensor),
        shared=float(sum(count * m * n for (m, n), count in own)),
        on_host=train.parallel.optimizer_memory == "host",
        reduces_once=train.parallel.reduce == "step",
    )
    counted = work(job, chip)
    if chip.name not in TPUS and (slower := SLOWER.get(run.backend.backend)):
        scores, flops = slower * counted.scores, slower * counted.score_flops
        counted = replace(counted, scores=scores, score_flops=flops)
    if run.backend.backend == "ponente":
        # All published rows are of other kernels; the ratio is the compiler's, not measured.
        ratio = cycles_over_splash(model, train.sequence_length)
        counted = replace(counted, scores=ratio * counted.scores)
    found = times(counted, chip, rates(chip))
    causal, full = (
        job.tokens * training_flops_per_token(model, train.sequence_length, causal=causal)
        for causal in (True, False)
    )
    peak = chip.peak * sum(found.values())
    return Forecast(
        times=found,
        tokens=train.batch_size * train.sequence_length,
        mfu=causal / peak,
        mfu_full=full / peak,
        ratios=GUESSED if chip.name == CPU else RANGES[size_class(model.parameter_count, devices)],
    )


def size_class(parameters: int, chips: int) -> tuple[str, str]:
    """The key of `RANGES`."""
    size = "below 350M" if parameters < 350e6 else "350M and more"
    return size, "1 chip" if chips == 1 else "2 to 8 chips" if chips <= 8 else "more chips"


def times(work: Work, chip: Chip, rates: Rates) -> dict[str, Any]:
    """Predicted seconds of one step, by kind of work in the order of `KINDS`."""
    speed = chip.peak * rates.matmul
    matmuls = _larger(work.matmul_flops / speed, work.matmul_bytes / chip.bandwidth)
    head = matmuls * (work.head_flops / work.matmul_flops)
    score = score_seconds(chip)
    attention = _larger(work.scores * rates.scores * score, work.score_flops / speed)
    moved = rates.streams * 12 * work.logits / chip.bandwidth
    loss = _larger(moved, work.logits * rates.logits * score)
    elementwise = rates.streams * work.stream_bytes / chip.bandwidth + loss
    update = work.update_bytes / chip.bandwidth + work.update_flops / speed
    waiting = _waiting(work, chip, rates, matmuls + attention + elementwise)
    fixed = rates.fixed + rates.doubling * work.doublings
    parts = (matmuls - head, head, attention, elementwise, update, waiting, fixed)
    return dict(zip(KINDS, parts, strict=True))


def score_seconds(chip: Chip) -> float:
    """The unit of `scores` and `logits`: one exponential on a GPU, 256 FLOPs at peak on a TPU.

    TPUs use the peak because it fits the published rows better than the vector unit's clock; a CPU
    has no other number.
    """
    return 1 / EXPONENTIALS[chip.name] if chip.name in EXPONENTIALS else 256 / chip.peak


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
