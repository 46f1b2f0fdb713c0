"""A correction of predicted step times by measured ones of the same hardware; imports no JAX.

The logarithm of measured / predicted time is a Gaussian process over trainings: a term of the
hardware with its software, one of each kind of work (`step_time.KINDS`) weighted by its share of
the predicted time, one of the program, which programs of similar sizes have in common, and noise.
A profile measures kinds alone. Few runs are thereby shrunk towards 1, and each run narrows the
interval, whose ends over its middle are those of the table to the power of (deviation with the
runs / deviation without them). Without a run factor and interval are the table's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from training.cost.resolved_run import ResolvedPhase
from training.cost.step_time import CPU, KINDS, Forecast


@dataclass(frozen=True)
class Spread:
    """Prior standard deviations of the terms; `part` is a kind's noise in a profile."""

    hardware: float
    kind: float
    program: float
    noise: float
    part: float


CHIPS = Spread(hardware=0.12, kind=0.10, program=0.10, noise=0.08, part=0.1)
"""Of the published rows, with each row's group of source and chip as the store of its other rows
(docs/predictions.md)."""
CPUS = Spread(hardware=1.0, kind=0.5, program=0.2, noise=0.25, part=1.0)
"""A guess; other processes share a CPU's cores, and disturb a profile most."""
_ALIKE = 1.0
"""Distance of two programs, in natural logarithms of their sizes, at which little is common."""


@dataclass(frozen=True)
class Measurement:
    """Measured over predicted time, of a step or of one kind of its work.

    Attributes:
        shares: of the predicted time by kind; their sum is 1.
        place: logarithms of the program's sizes; empty for one kind's time.
        disturbed: deviation of the logarithm of single steps' times, 0 where it is not known: the
            devices did other work too, and the run says less.
    """

    ratio: float
    shares: Mapping[str, float]
    place: tuple[float, ...] = ()
    disturbed: float = 0.0


@dataclass(frozen=True)
class Correction:
    """What measurements say of a predicted step: factors of its time and of each kind's.

    `narrowed` is the deviation with the measurements / without them, above 0 to 1.
    """

    factor: float
    kinds: Mapping[str, float]
    narrowed: float

    def applied(self, step: Forecast) -> Forecast:
        """The corrected prediction; its kinds add up to `factor` x the time before."""
        times = {kind: self.kinds[kind] * seconds for kind, seconds in step.times.items()}
        scale = self.factor * step.seconds / sum(times.values())
        low, high = (end**self.narrowed for end in step.ratios)
        return replace(
            step,
            times={kind: scale * seconds for kind, seconds in times.items()},
            mfu=step.mfu / self.factor,
            mfu_full=step.mfu_full / self.factor,
            ratios=(low, high),
        )


def spread_of(chip: str) -> Spread:
    return CPUS if chip == CPU else CHIPS


def place_of(run: ResolvedPhase) -> tuple[float, ...]:
    """`Measurement.place` of a program: tokens of a device, widths, depth, ids and length."""
    model, train = run.model, run.train
    tokens = train.batch_size * train.sequence_length / run.devices.count
    sizes = (tokens, model.embed, model.layers, model.padded_vocab_size, train.sequence_length)
    return tuple(map(math.log, sizes))


def measurements(
    step: Forecast,
    run: ResolvedPhase,
    seconds: float,
    parts: Mapping[str, float],
    disturbed: float = 0.0,
) -> list[Measurement]:
    """What a step that took `seconds` says, and a profile's seconds of some kinds, if any."""
    ratios = {k: each / step.times[k] for k, each in parts.items() if each and step.times[k]}
    return [
        Measurement(seconds / step.seconds, step.shares, place_of(run), disturbed),
        *(Measurement(ratio, {k: 1.0}, disturbed=disturbed) for k, ratio in ratios.items()),
    ]


def correction(
    shares: Mapping[str, float],
    place: tuple[float, ...],
    measured: Sequence[Measurement],
    spread: Spread,
) -> Correction:
    """The correction of a step whose predicted time has these shares, of a program at `place`."""
    if not measured:
        return Correction(1.0, dict.fromkeys(KINDS, 1.0), 1.0)
    import numpy as np

    every = [Measurement(1.0, shares, place), *(Measurement(1.0, {kind: 1.0}) for kind in KINDS)]
    asked, every = len(every), [*every, *measured]
    weights = np.array([[each.shares.get(kind, 0.0) for kind in KINDS] for each in every])
    between = spread.hardware**2 + spread.kind**2 * weights @ weights.T
    nowhere = (math.nan,) * len(place)  # a kind alone has no program, and nothing in common with it
    places = np.array([each.place or nowhere for each in every])
    squares = np.square(places[:, None] - places[None]).sum(axis=2)
    between += spread.program**2 * np.nan_to_num(np.exp(-squares / (2 * _ALIKE**2)))
    across, among = between[:asked, asked:], between[asked:, asked:]
    usual = [spread.noise if each.place else spread.part for each in measured]
    noise = [a**2 + each.disturbed**2 for a, each in zip(usual, measured, strict=True)]
    gain = np.linalg.solve(among + np.diag(noise), across.T).T
    step, *kinds = np.exp(gain @ np.log([each.ratio for each in measured])).tolist()
    before = between[0, 0] + spread.noise**2
    left = max(before - gain[0] @ across[0], spread.noise**2)
    return Correction(step, dict(zip(KINDS, kinds, strict=True)), math.sqrt(left / before))
