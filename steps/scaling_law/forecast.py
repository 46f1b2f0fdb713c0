"""The last validation loss of a training before it runs, from finished runs of its store.

A run counts if its data (but for the order), recipe and evaluation are those of the training. What
grows with a model or its budget may differ: sizes, steps, batch, rates, warmup and weight decay. Of
runs that differ in seeds the mean counts, of other runs of equal N and D the lowest loss.

The law is L(D) = E + B / D^beta of three runs or more of the same model and settings; else
L(N, D) = E + A / N^alpha + B / D^beta where N and D of the runs determine it; else L(D) of two. So
few runs leave the exponents and the noise open, so these have priors: draws of them are weighted by
the likelihood of the losses (importance sampling), and E, A and B of a draw come from linear least
squares with its covariance. This takes 0.05 s of processor time; 200 refits of
`steps.scaling_law.fit`, which has no prior, take 5. The interval is as good as the law's form:
docs/scaling.md has measured coverages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.shape.config import TransformerConfig
from pipeline.errors import PonenteError
from pipeline.identity.fingerprint import canonical, digest, plain, without_defaults
from pipeline.store.parallel import concurrently
from steps.artifacts import Checkpoint, Sequences
from steps.checkpoints.finished import NOT_OURS, TRAIN, manifest_of, trainings
from steps.measured import recipe_of, without
from steps.scaling_law.early import bounds, ratios
from steps.scaling_law.points import Point, groups, point_of, why_not_two_variables
from training.config import OptimizerConfig, TrainConfig

SHARE = 0.8
"""Probability of the interval."""
LEAST_STEPS = 500
"""Of a run that counts, and of one with a forecast: no law describes the beginning of training."""
SIZES = ("layers", "embed", "heads", "kv_heads", "head_size", "mlp")
SCALED = ("learning_rate", "muon_learning_rate", "warmup", "weight_decay")
_OF_RUN = ("steps", "seed", "milestones", "keep_every", "microbatches")
_OF_BATCH = (*_OF_RUN, "batch_size", "batch_schedule")
_EXPONENT = (0.1, 1.0)  # prior of alpha and beta, uniform; published ones are 0.28 to 0.37
_NOISE = (0.009, 1.0)
"""Prior of a run's noise in log L: median, and standard deviation of its logarithm; those of 14
models of 0.4 and 1.0 million parameters with three seeds each."""
_TOO_SHORT = "its runs are too short for a power law: the more tokens, the faster their losses fall"
_DRAWS = 20_000
_APART = 1.05  # token counts within this factor count as one


@dataclass(frozen=True)
class Run:
    """A training by what its loss depends on.

    Attributes:
        family: digest of what all runs of a law have in common.
        settings: digest of all but the tokens and the seeds.
        point: N, D and the loss, NaN before the run.
    """

    family: str
    settings: str
    point: Point


@dataclass(frozen=True)
class LossForecast:
    """The loss in nats per token, with its interval of probability `SHARE`."""

    loss: float
    low: float
    high: float
    law: str
    runs: int

    def __str__(self) -> str:
        interval = f"{SHARE:.0%}: {self.low:.3f} to {self.high:.3f}"
        return f"{self.loss:.3f} nats per token ({interval}), by {self.law} of {self.runs} runs"


def described(
    data: str,
    model: TransformerConfig,
    optimizer: Any,
    train: TrainConfig,
    splits: Sequence[str],
    loss: float = math.nan,
) -> Run:
    """A training on sequences of the recipe `data`, `optimizer` in its canonical form."""
    trees = [without_defaults(each) for each in (canonical(model), optimizer, canonical(train))]
    common = [data, list(splits), train.evaluate_sequences]
    settings = digest([*common, *map(without, trees, ((), (), _OF_RUN))])
    family = digest([*common, *map(without, trees, (SIZES, SCALED, _OF_BATCH))])
    return Run(family, settings, point_of("", model, train, loss))


def finished(store: str) -> Iterator[tuple[Checkpoint, Run]]:
    """Finished trainings in a store from new parameters."""
    for run in trainings(store, TRAIN):
        made = run.manifest
        # An output of a version with other fields, or without its inputs, is no run of this recipe.
        with contextlib.suppress(*NOT_OURS):
            data = _data(run.input_paths["sequences"])
            optimizer, loss = made.config["fields"]["optimizer"], made.result["last"]["loss"]
            given = run.model, optimizer, run.train, plain(made.config).get("splits", ())
            if not 0 < loss < math.inf:
                continue
            yield run, described(data, *given, loss)


def forecast_of(own: str, *training: Any) -> LossForecast | str:
    """The forecast of the training in the directory `own` by finished runs of its store.

    Or the reason why they allow none; arguments as of `_behind`.
    """
    found = _behind(own, *training)
    return found if isinstance(found, str) else forecast(found[0], (each for _, each in found[1]))


def _behind(
    own: str,
    sequences: Sequences,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    splits: Sequence[str],
) -> tuple[Run, list[tuple[Checkpoint, Run]]] | str:
    """The run that is forecast and those of its store that count; or why there are none."""
    if train.steps < LEAST_STEPS:
        return f"a run of fewer than {LEAST_STEPS} steps is the beginning of training"
    try:
        data = _data(sequences.path)
        found = list(finished(own.rpartition("/")[0]))
    except (PonenteError, OSError) as error:  # a training does not need its forecast
        return f"the store's runs could not be read ({error})"
    wanted = described(data, model, canonical(optimizer), train, splits)
    return wanted, [
        run for run in found if run[0].path != own and run[0].train.steps >= LEAST_STEPS
    ]


@functools.lru_cache(256)
def _data(path: str) -> str:
    """Digest of how sequences were made, but for the order; their path where that is gone."""
    made = manifest_of(path)
    return (recipe_of(path, made) if made else "") or path


def forecast_row(own: str, *training: Any) -> dict[str, Any] | None:
    """`TrainJob.forecast` of a training, arguments as of `_behind`."""
    behind, steps = _behind(own, *training), training[3].steps
    if isinstance(behind, str):
        return None
    wanted, runs = behind
    found = forecast(wanted, (each for _, each in runs))
    if isinstance(found, str):
        return None
    family = [(run, each.point) for run, each in runs if each.family == wanted.family]
    seen = zip(family, concurrently(ratios, (run for run, _ in family), own), strict=True)
    known = [(point, each) for (_, point), each in seen if each is not None]
    early = bounds((found.low, found.high), wanted.point, steps, known) if known else []
    return {"steps": steps, **vars(found), "early": early}


def score(rows: Iterable[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    """{"forecast": the row of this run with its score by the evaluation `last`}; empty for none."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["steps"] == last["step"]:
            names = ("loss", "low", "high", "law", "runs")
            inside = row["low"] <= last["loss"] <= row["high"]
            found["forecast"] = {n: row[n] for n in names}
            found["forecast"] |= {"measured": last["loss"], "inside": inside}
    return found


def sentence(row: dict[str, Any]) -> str:
    """Of a forecast that was scored."""
    where = "inside" if row["inside"] else "outside"
    interval = f"{where} {SHARE:.0%}: {row['low']:.3f} to {row['high']:.3f}"
    error = row["measured"] / row["loss"] - 1
    return f"forecast {row['loss']:.3f}, measured {row['measured']:.3f} ({error:+.2%}, {interval})"


def scored(store: str) -> list[str]:
    """Lines about the forecasts of a store's finished trainings: each, and their coverage."""
    rows = {run.path: run.result.get("measured", {}).get("forecast") for run, _ in finished(store)}
    known = {path: row for path, row in rows.items() if row}
    lines = [f"{path.rpartition('/')[2]}  {sentence(row)}" for path, row in known.items()]
    if not known:
        return [f"{len(rows)} finished runs, none with a forecast"]
    errors = [row["measured"] / row["loss"] - 1 for row in known.values()]
    inside = sum(row["inside"] for row in known.values())
    mean, size = (math.fsum(each) / len(errors) for each in (errors, map(abs, errors)))
    share = f"{inside} of {len(known)} inside their {SHARE:.0%} interval"
    error = f"error {mean:+.2%} on average, {size:.2%} in size"
    return [*lines, f"{share} ({inside / len(known):.0%}); {error}"]


def forecast(wanted: Run, runs: Iterable[Run]) -> LossForecast | str:
    """The forecast, or the reason why these runs allow none."""
    runs = list(runs)
    family = [run for run in runs if run.family == wanted.family]
    same = _lowest(run for run in family if run.settings == wanted.settings)
    counts = len(groups([point.tokens for point in same], _APART))
    points = _lowest(family)
    why = why_not_two_variables(points) if points else "L(N, D) needs runs"
    if not why and counts < 3:
        return _posterior(points, wanted.point, ("parameters", "tokens"))
    if counts > 1:
        return _posterior(same, wanted.point, ("tokens",))
    if not runs:
        return f"no finished run of {LEAST_STEPS} steps or more in this store"
    return (
        f"{len(family)} of {len(runs)} finished runs have its data, recipe and evaluation ({why}); "
        f"L(D) needs 2 token counts of its model and settings, found {counts}"
    )


def _lowest(runs: Iterable[Run]) -> list[Point]:
    """One point for each N and D: the mean over seeds, and of these the lowest."""
    losses: dict[tuple[int, int], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        losses[run.point.parameters, run.point.tokens][run.settings].append(run.point)
    found = []
    for settings in losses.values():
        means = {k: math.fsum(p.loss for p in each) / len(each) for k, each in settings.items()}
        key = min(means, key=means.__getitem__)
        found.append(replace(settings[key][0], loss=means[key]))
    return sorted(found, key=lambda point: (point.parameters, point.tokens))


def _too_short(points: Sequence[Point]) -> bool:
    """Whether the losses of each size, at its three largest D, fall ever faster with log D.

    They do so at the beginning of training; a power law has a slope that only decreases. Two
    standard errors, at the noise of the prior.
    """
    change, variance = 0.0, 0.0
    for _, each in itertools.groupby(points, key=lambda point: point.parameters):
        last = list(each)[-3:]
        if len(last) == 3:
            x, y = [math.log(p.tokens) for p in last], [p.loss for p in last]
            of = 1 / (x[1] - x[0]), 1 / (x[2] - x[1])
            weights = -of[0], of[0] + of[1], -of[1]
            change += sum(w * loss for w, loss in zip(weights, y, strict=True))
            variance += sum((w * loss * _NOISE[0]) ** 2 for w, loss in zip(weights, y, strict=True))
    return change > 2 * math.sqrt(variance)


def _posterior(points: Sequence[Point], wanted: Point, axes: Sequence[str]) -> LossForecast | str:
    """By a law of the `axes`, "parameters" and "tokens" or the latter."""
    import numpy as np

    if _too_short(points):
        return _TOO_SHORT
    random = np.random.default_rng(0)
    exponents = random.uniform(*_EXPONENT, (_DRAWS, 1, len(axes)))
    noise = _NOISE[0] * np.exp(_NOISE[1] * random.standard_normal((_DRAWS, 1)))
    sizes = np.array([[getattr(point, name) for name in axes] for point in points], float)
    losses = np.array([point.loss for point in points])
    first, last = (ends(axis=0) ** -exponents for ends in (sizes.min, sizes.max))

    def columns(powers: np.ndarray) -> np.ndarray:
        """Shares of the parameters in a loss, [draw, run, 1 + axis], by N^-alpha and D^-beta.

        The parameters are the loss where all axes are at their least, and where one is at its most:
        unlike that of E, A and B, their flat prior depends on no unit.
        """
        share = (powers - first) / (last - first)
        return np.concatenate([1 - share.sum(axis=2, keepdims=True), share], axis=2)

    of_runs = columns(sizes**-exponents) / losses[:, None]
    inverse = np.linalg.inv(of_runs.swapaxes(1, 2) @ of_runs)
    best = (inverse @ of_runs.sum(axis=1)[:, :, None])[:, :, 0]
    squares = np.square((of_runs @ best[:, :, None])[:, :, 0] - 1).sum(axis=1)
    spread = np.linalg.cholesky(inverse) @ random.standard_normal((_DRAWS, len(axes) + 1, 1))
    drawn = best + noise * spread[:, :, 0]
    log = -squares / (2 * noise[:, 0] ** 2) + np.log(np.linalg.det(inverse)) / 2
    log -= (len(points) - len(axes) - 1) * np.log(noise[:, 0])
    ends = [np.array([[getattr(wanted, name) for name in axes]], float) ** -exponents, 0 * first]
    values, floor = ((columns(each)[:, 0] * drawn).sum(axis=1) for each in ends)
    falls = (drawn[:, :1] > drawn[:, 1:]).all(axis=1)
    likely = np.exp(log - log.max())
    weights = likely * falls * (floor > 0)
    if weights.sum() < 0.02 * likely.sum():
        return f"the losses of its runs do not fall with the {' and the '.join(axes)}"
    values = values * np.exp(noise[:, 0] * random.standard_normal(_DRAWS))
    order = np.argsort(values)
    shares = np.array([(1 - SHARE) / 2, 0.5, (1 + SHARE) / 2]) * weights.sum()
    low, loss, high = values[order][np.searchsorted(np.cumsum(weights[order]), shares)]
    law = "L(N, D)" if "parameters" in axes else "L(D)"
    return LossForecast(float(loss), float(low), float(high), law, len(points))
