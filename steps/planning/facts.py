"""The facts of a step that trains, which `plan` shows and checks; see `pipeline.graph.facts`."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
from collections.abc import Callable
from typing import Any

from models.flops import parameters
from models.hf import architectures
from pipeline.accelerators import Chip
from pipeline.graph.facts import Facts, Results
from pipeline.graph.node import Node
from steps.planning import memory
from steps.planning.cost import RunTime, checkpoint_bytes, money, run_time
from steps.planning.declared_run import DeclaredRun, declared_run
from steps.planning.memory import GIB, Fit
from training.config.validation import INSTALL, TRACKERS
from training.cost import calibration
from training.cost.shape_lint import lint
from training.cost.step_forecast import Forecast, forecast

_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")


def training_facts(node: Node, results: Results) -> Facts:
    """Size, memory, predicted speed, time and cost of a step that trains.

    With a refusal if the step cannot fit, or the compiler's check as `examine` if one is available.
    """
    run = declared_run(node, results)
    if run is None:
        return Facts()
    lines, data = _size(run)
    chip = memory.chip_of(run.hardware)
    if chip is None:
        line, refusal = _on_this_machine(run)
        return Facts((*lines, *line), data, refusal)
    fit = memory.fit(run.model, run.optimizer, run.train, run.hardware)
    devices, slices = run.hardware.devices, run.hardware.slices
    step = forecast(run.model, run.optimizer, fit.train, chip, devices, slices)
    lines.append(f"memory      by formula {fit.line(chip.name)}")
    data["memory"] = {
        "source": "formula",
        "fits": fit.fits,
        "need_bytes": int(fit.estimate.total),
        "limit_bytes": int(fit.limit),
        "parts": {name: int(size) for name, size in fit.estimate.parts.items()},
    }
    if not fit.fits:
        return _too_large(run, fit, lines, data)
    lines += _speed(run, fit, step, chip, data)
    if run.steps:
        lines += _whole_run(run, fit, step, chip, data)
    return Facts(tuple(lines), data, examine=_examination(run))


def _size(run: DeclaredRun) -> tuple[list[str], dict[str, Any]]:
    """Lines and data about the model, the length of training, the export and the trackers."""
    model, train = run.model, run.train
    count = parameters(model)
    data: dict[str, Any] = {
        "parameters": count.total,
        "parameters_without_embeddings": count.without_embeddings,
        "tokens": run.tokens,
        "flops": run.flops,
        "checkpoint_bytes": int(checkpoint_bytes(run)),
        "export": architectures.describe(model),
    }
    size = f"{count.total:,} parameters, {count.without_embeddings:,} without embeddings"
    lines = [f"model       {size}; a checkpoint has {checkpoint_bytes(run) / 1e9:.2f} GB"]
    if run.tokens is None:
        lines.append("training    the number of steps is known when the sequences are built")
    else:
        about = "" if run.exact else "about "
        lines.append(
            f"training    {about}{run.steps:,} steps, {run.tokens:,} tokens "
            f"({run.tokens / count.total:.1f} per parameter), {run.flops:.2e} FLOPs"
        )
    lines.append(f"afterwards  {architectures.describe(model)}")
    lines += [
        f"tracker     {module} is not installed here; {INSTALL.format(name)}"
        for name, module in TRACKERS.items()
        if name in train.trackers and importlib.util.find_spec(module) is None
    ]
    return lines, data


def _on_this_machine(run: DeclaredRun) -> tuple[list[str], str]:
    """A line about memory, and a refusal if the state is larger than this machine's memory."""
    need, available = memory.host_need(run), memory.host_memory()
    found = any(glob.glob(pattern) for pattern in _ACCELERATORS)
    what = f"state and gradients {need / GIB:.2f} GiB, this machine has {available / GIB:.1f}"
    if run.hardware.kind == "local" and found:
        return [f"memory      {what}; its accelerators are not checked"], ""
    if need <= available:
        return [f"memory      {what}"], ""
    return [f"memory      {what}"], (
        f"does not fit this machine: {what} GiB. Choose a smaller model or a pod, such as "
        'hardware "v6e-8"'
    )


def _too_large(run: DeclaredRun, fit: Fit, lines: list[str], data: dict[str, Any]) -> Facts:
    """A refusal, or a check by the compiler if the formula's error could make the step fit."""
    others = memory.nearest(run)
    data["fitting"] = others
    why = _changes(f"does not fit {run.hardware.name} by formula", fit, others)
    if fit.cannot:
        return Facts(tuple(lines), data, why)
    examine = _examination(run)
    if examine is None:
        lines.append(
            "            compiled peaks are 6 to 28 % below the formula; the compiler was not run"
        )
        lines += [f"            fits by formula: {other}" for other in others]
    return Facts(tuple(lines), data, examine=examine)


def _changes(what: str, fit: Fit, others: list[str]) -> str:
    need, limit = fit.estimate.total / GIB, fit.limit / GIB
    short = f"{what}: {need:.1f} of {limit:.2f} GiB per device, short by {need - limit:.1f}"
    if not others:
        return f"{short}; no smaller batch and no larger slice of this kind fits by formula"
    return "\n".join([f"{short}; these fit by formula:", *(f"  {other}" for other in others)])


def _speed(
    run: DeclaredRun, fit: Fit, step: Forecast, chip: Chip, data: dict[str, Any]
) -> list[str]:
    fast, slow = step.range
    shares = ", ".join(f"{kind} {part:.0%}" for kind, part in step.shares.items() if part >= 0.005)
    data["predicted"] = {
        "step_seconds": [fast, step.seconds, slow],
        "tokens_per_second": [step.tokens / each for each in (slow, step.seconds, fast)],
        "mfu_causal": step.mfu,
        "mfu_full_attention": step.mfu_full,
        "shares": step.shares,
        "error_median": calibration.ERROR,
        "error_90": calibration.ERROR_90,
    }
    low, high = calibration.UNTUNED
    lines = [
        f"predicted   {fast:.3g} to {slow:.3g} s per step (middle {step.seconds:.3g}), "
        f"{step.tokens / slow:,.0f} to {step.tokens / fast:,.0f} tokens/s, MFU about "
        f"{step.mfu:.0%} causal, {step.mfu_full:.0%} full attention",
        f"            shares of its time: {shares}; remat {fit.train.remat}, "
        f"{fit.train.parallel.sharding}",
        f"            error on published runs, their source left out: median "
        f"{calibration.ERROR:.0%}, 90th percentile {calibration.ERROR_90:.0%} "
        f"(docs/predictions.md); untuned runs took {low:g} to {high:g} times the middle",
    ]
    wasted = lint(
        run.model,
        fit.train.parallel,
        platform=run.hardware.kind,
        sequence_length=run.train.sequence_length,
    )
    return [*lines, *(f"            {sentence}" for sentence in wasted)]


def _whole_run(
    run: DeclaredRun, fit: Fit, step: Forecast, chip: Chip, data: dict[str, Any]
) -> list[str]:
    share = _mean_seconds(run, fit, chip) / step.seconds
    ends = tuple(run_time(run, fit.train, step, share * seconds) for seconds in step.range)
    fast, slow = ends
    data["run"] = {"fast": dataclasses.asdict(fast), "slow": dataclasses.asdict(slow)}
    extra = f"start {slow.start:.0f} s, checkpoints {slow.checkpoints:.0f} s, evaluations "
    extra += f"{slow.evaluations:.0f} s, expected loss to preemption {slow.preemptions:.0f} s"
    if fit.train.evaluate_batches == "all":
        extra += " (evaluation of whole splits is not counted)"
    return [
        f"run         {_hours(fast)} to {_hours(slow)} h of {run.hardware.devices} {chip.name}: "
        f"at the slow end {extra}",
        *(f"cost        {line}" for line in money(run, chip, (fast, slow))),
    ]


def _mean_seconds(run: DeclaredRun, fit: Fit, chip: Chip) -> float:
    """Predicted seconds of a step, the mean over all steps; every phase has the same sharding."""
    total = 0.0
    devices, slices = run.hardware.devices, run.hardware.slices
    for steps, train in run.phases:
        train = dataclasses.replace(train, parallel=fit.train.parallel)
        train = memory.fit(run.model, run.optimizer, train, run.hardware).train
        each = forecast(run.model, run.optimizer, train, chip, devices, slices)
        total += steps * each.seconds
    return total / sum(steps for steps, _ in run.phases)


def _hours(time: RunTime) -> str:
    return f"{time.total / 3600:.2f}"


def _examination(run: DeclaredRun) -> Callable[[Callable[[str], None]], Facts] | None:
    """A check by the TPU compiler, which takes minutes; None for other hardware or no libtpu."""
    if run.hardware.kind != "tpu" or importlib.util.find_spec("libtpu") is None:
        return None
    return lambda show: compiled_facts(run, show)


def compiled_facts(run: DeclaredRun, show: Callable[[str], None]) -> Facts:
    """The TPU compiler's verdict on the memory of the run's largest step."""
    from training.compile_check import check

    # The schedule's length is only a constant of the program, so any number gives the same memory.
    train = dataclasses.replace(run.train, steps=run.steps or 1000)
    found = check(run.model, run.optimizer, train, run.hardware.name, show)
    need = found["need_gib"] if found["peak_gib"] is None else found["peak_gib"]
    limit = found["limit_gib"]
    sizes = (
        f"arguments {found['arguments_gib']:.2f}, temporaries {found['temporaries_gib']:.2f} GiB"
    )
    seconds, libtpu = found["compile_seconds"], found["versions"]["libtpu"]
    compiler = f"TPU compiler (libtpu {libtpu}, {seconds:.0f} s)"
    data = {"compiled": {name: found[name] for name in _KEPT}}
    if found["fits"]:
        line = f"memory      by the {compiler}: peak {need:.2f} of {limit:.2f} GiB, fits; {sizes}"
        return Facts((line,), data)
    over = f"needs {need:.2f} of {limit:.2f} GiB, short by {need - limit:.2f}; {sizes}"
    estimated = sum(found["estimate_gib"].values())
    others = memory.nearest(run, share=min(1.0, estimated / need))
    parts = sorted(found["estimate_gib"].items(), key=lambda part: -part[1])[:5]
    named = ", ".join(f"{part} {size:.1f}" for part, size in parts)
    return Facts(
        data={**data, "fitting": others},
        refusal="\n".join(
            [
                f"does not fit {run.hardware.name} by the {compiler}: {over}",
                f"  largest by formula, GiB: {named}",
                *(f"  fits by formula: {other}" for other in others),
            ]
        ),
    )


_KEPT = (
    *("fits", "limit_gib", "need_gib", "peak_gib", "arguments_gib", "temporaries_gib"),
    *("host_gib", "compile_seconds", "versions"),
)
