"""Simulates a training on machines that are taken away: hours held, finish, the best interval.

A trial alternates between machines that it holds until they are taken away, without notice, and a
wait for new ones. A simulated attempt starts, then repeats `every` steps and a save; the steps
after its last save are done again by the next attempt. Held time is paid, waiting is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

TRIALS = 4000
_SEARCH_TRIALS = 1000
_MOST = 500  # preemptions more than twice the least, after which a trial never finishes
_Z90 = 1.2816  # 90th percentile of the standard normal distribution


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is left of a training, in steps and seconds.

    Attributes:
        step: 10th, 50th and 90th percentile of a step with its share of evaluations; a trial draws
            one of them for all its steps.
        save: for which a save stops the steps.
        start, restart: from machines that are ready to the first step, of the first attempt and of
            one that resumes.
    """

    steps: int
    step: tuple[float, float, float]
    save: float
    start: float
    restart: float

    def alone(self, every: int) -> float:
        """Seconds with the median step on machines that are never taken away."""
        return self.start + self.steps * self.step[1] + math.ceil(self.steps / every) * self.save


@dataclass(frozen=True, kw_only=True)
class Preemptions:
    """When machines are taken away, and how long new ones take.

    `seconds` between two preemptions are samples, drawn with replacement, or one number, the mean
    of an exponential distribution; infinity for machines that are never taken away. `wait` is the
    mean of the seconds until there are new machines, exponential.
    """

    seconds: tuple[float, ...]
    wait: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Trials of one or more intervals, float64 [interval, trial]; infinity where one never ends.

    Seconds for which machines are `held` and paid, and in `total`, waits included. All intervals
    have the same preemptions.
    """

    held: np.ndarray
    total: np.ndarray
    preemptions: np.ndarray


def simulate(
    work: Work,
    preemptions: Preemptions,
    every: Sequence[int],
    trials: int = TRIALS,
    seed: int = 0,
) -> Simulated:
    """Trials of a training that saves after each multiple of `every` steps, and after the last."""
    import numpy as np  # here, because planning without a simulation does without it

    rng = np.random.default_rng(seed)
    # Log-normal, with another deviation on either side of the median.
    normal, (low, middle, high) = rng.standard_normal(trials) / _Z90, np.log(work.step)
    step = np.exp(middle + normal * np.where(normal < 0, middle - low, high - middle))
    steps_between = np.asarray(every, np.int64)[:, None]
    segment = steps_between * step + work.save
    left = np.full(segment.shape, work.steps, np.int64)
    held, waited, count = (np.zeros(segment.shape) for _ in range(3))
    going, begin = np.full(segment.shape, work.steps > 0), work.start
    samples = np.asarray(preemptions.seconds)
    most = _MOST + int(min(2.0 * work.alone(min(every)) / preemptions.mean, 2000.0))
    for _ in range(most):
        one = len(samples) == 1
        until = samples * rng.exponential(size=trials) if one else rng.choice(samples, trials)
        wait = preemptions.wait * rng.exponential(size=trials)
        whole = begin + left * step + -(-left // steps_between) * work.save
        lost = going & (whole > until)
        held += np.where(lost, until, np.where(going, whole, 0.0))
        if not lost.any():
            return Simulated(held=held, total=held + waited, preemptions=count)
        saves = np.clip((until - begin) / segment, 0, left // steps_between).astype(np.int64)
        left -= np.where(lost, saves * steps_between, 0)
        waited += np.where(lost, wait, 0.0)
        count += lost
        going, begin = lost, work.restart
    held[going] = np.inf
    return Simulated(held=held, total=held + waited, preemptions=count)


def best_every(work: Work, preemptions: Preemptions, least: int = 1) -> int:
    """Steps between saves, at least `least`, with the least mean of the seconds held.

    The search begins at the interval of Young (1974), sqrt(2 * save * mean interval), and takes
    steps of 9 % to a sixteenth and to 16 times of it.
    """
    import numpy as np

    young = np.sqrt(2 * work.save * min(preemptions.mean, 1e12)) / work.step[1]
    grid = np.clip(young * 2 ** (np.arange(-32, 33) / 8), least, max(work.steps, least))
    found = np.unique(np.rint(grid).astype(np.int64))
    held = simulate(work, preemptions, found.tolist(), _SEARCH_TRIALS).held.mean(axis=1)
    return int(found[np.argmin(held)])
