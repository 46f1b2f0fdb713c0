"""A ladder of runs, the law fitted to their losses, and what larger budgets buy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from models.shape.validation import at_least
from pipeline import Artifact, InputError, Result, StepContext, step, sweep
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node
from pipeline.store import storage
from pipeline.store.manifest import load
from steps.artifacts import Checkpoint, Report, Scores
from steps.scaling_law.points import (
    Point,
    check_frontier,
    point_of,
    same_budget,
    short,
    why_not_two_variables,
)
from steps.training.budget import MOST_EPOCHS
from steps.training.plan.declared_run import declared_run
from training.config import TrainConfig

A = TypeVar("A", bound=Artifact)
_MORE = (10.0, 100.0)
"""Default budgets, as multiples of the FLOPs of the largest run."""


def ladder(
    build: Callable[[TransformerConfig, int], A],
    models: Sequence[TransformerConfig],
    *,
    flops: Sequence[float],
    length: int,
) -> tuple[A, ...]:
    """The outputs of `build(model, tokens)` for every model and budget, labelled with both.

        runs = ladder(rung, models, flops=(1e17, 4e17), length=2048)

    Args:
        build: declares the training of a model on a number of tokens, for example with
            `train(..., tokens=tokens)`, which rounds them down to whole batches. It also chooses
            the settings that depend on the size (learning rate, batch).
    """
    rungs: dict[str, tuple[TransformerConfig, int]] = {}
    for model in models:
        for budget in flops:
            name = f"{short(model.parameter_count)} by {budget:.3g} FLOPs"
            if name in rungs:
                raise InputError(f"ladder: two runs of {name}; give each size and budget once")
            tokens = budget / training_flops_per_token(model, length, causal=True)
            if not length <= tokens < math.inf:
                raise InputError(
                    f"ladder: {name} are {tokens:.0f} tokens, expected at least one sequence of "
                    f"{length}; raise the FLOPs"
                )
            rungs[name] = (model, int(tokens))

    def declare(rung: tuple[TransformerConfig, int]) -> A:
        return build(*rung)

    return sweep(declare, rungs)


def _check(arguments: Mapping[str, Any]) -> None:
    for node in arguments["runs"]:
        if not issubclass(node.output, Checkpoint | Scores) or not _training(node):
            raise InputError(
                f"scaling: expected runs of training, or their scores, found {node.label!r}"
            )
        if not _begins_new(node):
            raise InputError(
                f"scaling: {node.label!r} begins with trained parameters, so its tokens are not "
                "all that it learned from; give runs that begin with new parameters"
            )
    at_least("scaling", runs=(len(arguments["runs"]), 3), resamples=(arguments["resamples"], 20))
    for budget in arguments["budgets"]:
        if not 0 < budget < math.inf:
            raise InputError(f"scaling.budgets: expected FLOPs above 0, got {budget}")


def _training(node: Node) -> list[Node]:
    """The steps that train `node`'s model, or the models that it was selected from."""
    if isinstance(node.config.get("train"), TrainConfig):
        return [node]
    return [found for each in _models(node) for found in _training(each)]


def _begins_new(node: Node) -> bool:
    """Whether `node`'s model, or all that it was selected from, began with new parameters."""
    if isinstance(node.config.get("train"), TrainConfig) and node.step.name != "extend":
        return node.step.name != "warm_start"
    above = _models(node)  # none of an imported model
    return bool(above) and all(map(_begins_new, above))


def _models(node: Node) -> list[Node]:
    return [each for each in node.inputs.values() if issubclass(each.output, Checkpoint | Scores)]


def _facts(node: Node, results: Results) -> Facts:
    """The law that the declared runs can determine; refuses runs that determine none."""
    points = []
    for each in node.inputs.values():
        run = declared_run(_training(each)[0], results)
        if run is None or run.steps is None:
            return Facts()
        points.append(point_of(each.label, run.model, run.whole, math.nan))
    reason = why_not_two_variables(points)
    if reason:
        try:
            check_frontier(len(same_budget(points)))
        except InputError as error:
            raise InputError(f"{reason}; and {error}") from None
    flops = math.fsum(point.flops for point in points)
    law = f"a power law in compute ({reason})" if reason else "L(N, D)"
    sizes = len({point.parameters for point in points})
    line = f"law         {law} of {len(points)} runs, {sizes} sizes, {flops:.2e} FLOPs in all"
    return Facts((line,), {"runs": len(points), "flops": flops, "two_variables": not reason})


@step(output=Report, version=1, reads_lineage=True, check=_check, facts=_facts)
def scaling(
    run: StepContext,
    runs: tuple[Artifact, ...],
    *,
    budgets: tuple[float, ...] = (),
    split: str = "",
    resamples: int = 200,
) -> Result:
    """L(N, D) = E + A / N^alpha + B / D^beta fitted to finished runs, as a page and as numbers.

    `steps.scaling_law.fit` documents the method. If N and D of the runs cannot determine this law,
    the step fits a power law in compute, L(C) = K / C^gamma, to the best run of each budget, and
    the result has the reason (`why_compute`).

    Args:
        runs: trained models, such as a `ladder`, or scores of them; each with a schedule of its
            own length, and one tokenizer for all.
        budgets: training FLOPs for which the result predicts the best size, tokens and loss. By
            default 10 and 100 times those of the largest run.
        split: held-out split whose loss is fitted; by default that of the first run's result.
        resamples: number of bootstrap refits, which give the intervals.

    Raises:
        InputError: the runs determine neither law, have different tokenizers, or one has no loss
            on the split.
    """
    from steps.pages import scaling_page
    from steps.scaling_law.fit import CONFIDENCE, ScalingLaw

    trained = [_checkpoint(each) for each in runs]
    tokenizers = {each.sequences.cache.result["tokenizer"] for each in trained}
    if len(tokenizers) > 1:
        raise InputError(
            f"scaling: expected runs of one tokenizer, found {len(tokenizers)}; losses per token "
            "of different tokenizers cannot be compared"
        )
    split = split or _rows(runs[0])[0]["split"]
    points = [_point(*pair, split) for pair in zip(trained, runs, strict=True)]
    epochs = [_epochs(*pair) for pair in zip(trained, points, strict=True)]
    if repeated := sum(each > MOST_EPOCHS for each in epochs):
        run.warn(
            f"{repeated} of {len(runs)} runs read their data more than {MOST_EPOCHS} times, up to "
            f"{max(epochs):.1f}; repeated tokens lower the loss less than the new ones that the "
            "law assumes"
        )
    law = ScalingLaw(points, resamples)
    if law.why_compute:
        run.warn(f"a power law in compute, since L(N, D) is not determined: {law.why_compute}")
    bought = [law.buy(each) for each in budgets or [more * law.largest for more in _MORE]]
    with run.shard("page") as directory:
        text = scaling_page.render(law, bought, split)
        storage.write_atomic(storage.join(directory, "index.html"), text.encode())
    return {
        "law": scaling_page.formula(law),
        "why_compute": law.why_compute,
        "split": split,
        "coefficients": {name: asdict(each) for name, each in law.coefficients().items()},
        "confidence": CONFIDENCE,
        "noise": law.fit.noise,
        "runs": [
            {**asdict(point), "fitted": float(fitted), "residual": math.log(point.loss / fitted)}
            for point, fitted in zip(law.points, law.fit.fitted, strict=True)
        ],
        "budgets": [{**asdict(each), "extrapolation": each.flops / law.largest} for each in bought],
        "headline": [scaling_page.formula(law), *(scaling_page.sentence(law, b) for b in bought)],
    }


def _rows(scored: Artifact) -> list[dict[str, Any]]:
    """Rows with split and loss of the finished model; the one of the headline comes first."""
    if "evaluations" in scored.result:
        last, rows = scored.result["last"], scored.result["evaluations"]
        return [last, *(row for row in rows if row["split"] != last["split"])]
    rows = scored.result.get("rows", [])
    if not rows:
        raise InputError(f"scaling: {scored.manifest.label} has no loss; give evaluate's scores")
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def _point(trained: Checkpoint, scored: Artifact, split: str) -> Point:
    """N, D, FLOPs and loss of a run; `scored` is the run itself or its scores."""
    name = trained.manifest.label
    losses = {row["split"]: row["loss"] for row in _rows(scored)}
    if split not in losses:
        raise InputError(f"scaling: {name} has no loss on {split!r}; it has {', '.join(losses)}")
    return point_of(name, trained.model, trained.train, losses[split])


def _epochs(trained: Checkpoint, point: Point) -> float:
    """How often a run read its data, or the source of a mixture that it read most often."""
    if recorded := trained.result.get("epochs"):
        return max(recorded)
    # Of an older run: a mean over the sources, or 0 for a mixture without their number.
    sequences = trained.sequences.result
    return point.tokens / (sequences.get("sequences", math.inf) * sequences["sequence_length"])


def _checkpoint(scored: Artifact) -> Checkpoint:
    if "evaluations" in scored.result:
        return Checkpoint(scored.path, scored.manifest)
    path = scored.input_paths.get("checkpoint") or scored.input_paths["model"]
    found = load(path)
    if found is None:
        raise InputError(f"scaling: {path}, which {scored.path} scored, is gone; run again")
    return Checkpoint(path, found)
