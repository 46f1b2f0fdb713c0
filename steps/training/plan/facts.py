"""The facts of a step that trains, which `plan` shows and checks; see `pipeline.graph.facts`."""

from __future__ import annotations

import dataclasses
import importlib.util
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

from models.hf import architectures
from models.shape.footprint import footprint
from pipeline.accelerators import Chip
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node
from pipeline.store import storage
from steps.artifacts import Sequences
from steps.platforms import chip_of, devices_here
from steps.scaling_law.forecast import SHARE, LossForecast, forecast_of
from steps.scaling_law.published_curves import published
from steps.training.budget import told_epochs
from steps.training.plan import memory
from steps.training.plan.bill import bill
from steps.training.plan.continued import store_of
from steps.training.plan.cost import (
    Ends,
    checkpoint_bytes,
    ends,
    money,
    phases_share,
    run_times,
    save_seconds,
)
from steps.training.plan.declared_run import DeclaredRun, declared_run, model_of
from steps.training.plan.experience import Hardware, Learned, predicted
from steps.training.plan.memory import GIB
from steps.training.plan.timings import work_of
from training.config.batch_schedule import rows_read
from training.config.train import INSTALL, TRACKERS
from training.cost import step_time
from training.cost.audit import CURES, Flaw
from training.cost.preemption import Work
from training.cost.resolved_run import ResolvedPhase, ResolvedRun, lint, resolve_run

ELSEWHERE = "steps.tuning.compare:compare"  # by name: it draws pages, and is above this folder


def training_facts(node: Node, results: Results) -> Facts:
    """Size, memory, predicted speed, time and cost of a step that trains.

    With a refusal if the step cannot fit, or the compiler's check as `examine` if one is available.
    """
    run = declared_run(node, results)
    if run is None:
        child, known = node.inputs.get("checkpoint"), "its size, memory, speed and cost are known"
        unknown = child is not None and model_of(node, results) is None
        return Facts((f"model       {known} when {child.label} is built",) if unknown else ())
    lines, data = _size(run)
    lines += _forecast(node, run, results, data)
    lines += _without_effect(run, run.steps) if run.steps else []
    devices, chip = devices_here(run.hardware), chip_of(run.hardware)
    if devices is None:
        need = f"memory      state and gradients {memory.host_need(run) / GIB:.2f} GiB"
        return Facts((*lines, f"{need}; this machine's accelerators are not checked"), data)
    train = run.whole if run.steps else run.train
    resolved = resolve_run(run.model, run.optimizer, train, devices, done=run.done)
    step, store = resolved.largest, store_of(results)
    where = Hardware.of(devices.chip)
    learned = predicted(step, where, store.prefix if store.learning else "")
    if chip is None:
        line, refusal = _on_this_machine(run, step.estimate.activations * devices.count)
        lines += [line, *_speed_here(run, resolved, learned, data)]
        seconds = _learned_here(run, resolved, learned)
        found = partial(work_of, node, run, results, devices, learned=seconds)
        billed = bill(run, results, found)
        why = refusal or billed.refusal
        return Facts((*lines, *billed.lines), {**data, **billed.data}, why, billed.seconds)
    lines.append(f"memory      by formula {memory.described(step, chip.name)}")
    data["memory"] = {
        "source": "formula",
        "fits": memory.fits(step),
        "need_bytes": int(step.estimate.total),
        "limit_bytes": int(memory.limit_of(step)),
        "parts": {name: int(size) for name, size in step.estimate.parts.items()},
    }
    if not memory.fits(step):
        return _too_large(run, step, lines, data)
    lines += _program(step, data)
    lines += _speed(run, step, learned, data)
    billed = Facts()
    if run.steps:
        work = _whole_run(run, resolved, learned, chip, data, lines)
        billed = bill(run, results, partial(work_of, node, run, results, devices, work))
    lines, data = [*lines, *billed.lines], {**data, **billed.data}
    return Facts(tuple(lines), data, billed.refusal, billed.seconds, _examination(run))


def _forecast(node: Node, run: DeclaredRun, results: Results, data: dict[str, Any]) -> list[str]:
    """Lines about the last loss of a training from new parameters, or why it is not known.

    By finished runs of the store; where these allow no forecast, also what published runs came to.
    """
    if node.step.name != "train":
        return []
    found: LossForecast | str = "the sequences are not built yet"
    store = store_of(results)
    if run.steps and (built := store.places.get(node.inputs["sequences"].key)):
        own = storage.join(store.prefix, node.directory)
        settings = run.model, run.optimizer, run.whole, node.config["splits"]
        found = forecast_of(own, Sequences(*built), *settings)
    if not isinstance(found, str):
        data["forecast"] = {**vars(found), "share": SHARE}
        return [f"loss        {found}"]
    said: dict[str, Any] = {"why": found}
    data["forecast"] = said
    lines = [f"loss        no forecast: {found}"]
    if run.steps and (theirs := published(run.model, run.optimizer, run.whole)):
        curve, flops = theirs
        low, bits, high = curve.loss(flops)
        outside = ", extrapolated" if curve.extrapolated(flops) else ""
        said["published"] = {"bits_per_byte": bits, "low": low, "high": high, "share": SHARE}
        said["published"] |= {"flops": flops, "data": curve.data}
        lines.append(
            f"            published runs of this optimizer, {flops:.2g} FLOPs{outside}: {bits:.3f} "
            f"bits a byte ({SHARE:.0%}: {low:.3f} to {high:.3f}) of {curve.data}"
        )
    return lines


def _without_effect(run: DeclaredRun, steps: int) -> list[str]:
    """A warning for every setting that begins after the last step."""
    whole, found = run.whole, []
    if whole.average_last and not whole.averaged_steps:
        found.append(
            f"warning     TrainConfig.average_last: {whole.average_last} of {steps:,} steps rounds "
            "to none: it has no effect"
        )
    begins = {
        "milestones": whole.milestones,
        "batch_schedule": [first for first, _ in whole.batch_schedule],
        "length_schedule": [first for first, _ in whole.length_schedule],
        "profile": (whole.profile or ())[:1],
    }
    for name, firsts in begins.items():
        # A milestone is saved after its step, a trace holds it: these may be the last step itself.
        if late := [first for first in firsts if first > steps - name.endswith("schedule")]:
            found.append(
                f"warning     TrainConfig.{name}: step {late[0]:,} is beyond the last step, "
                f"{steps:,}: it has no effect"
            )
    return found


def _size(run: DeclaredRun) -> tuple[list[str], dict[str, Any]]:
    """Lines and data about the model, the length of training, the export and the trackers."""
    model, train = run.model, run.train
    count = footprint(model)
    data: dict[str, Any] = {
        "parameters": count.parameters,
        "parameters_without_embeddings": count.without_embeddings,
        "steps": run.steps,
        "epochs": list(run.epochs),
        "steps_done": run.done,
        "tokens": run.tokens,
        "flops": run.flops,
        "checkpoint_bytes": int(checkpoint_bytes(run)),
        "export": architectures.describe(model),
    }
    size = f"{count.parameters:,} parameters, {count.without_embeddings:,} without embeddings"
    lines = [f"model       {size}; a checkpoint has {checkpoint_bytes(run) / 1e9:.2f} GB"]
    if run.steps is None:
        lines.append("training    the number of steps is known when the sequences are built")
    else:
        about = "" if run.exact else "about "
        total = rows_read(run.whole, run.steps) * run.whole.sequence_length
        size = (
            f"{run.steps:,} steps, {total:,} tokens ({total / count.parameters:.1f} per parameter)"
        )
        if run.done:
            size += f"; {run.steps - run.done:,} steps, {run.tokens:,} tokens are left"
        lines.append(f"training    {about}{size}, {run.flops:.2e} FLOPs")
    if run.epochs:
        often = ", ".join(f"{each:,.2f}" for each in run.epochs)
        lines.append(f"data        read {often} times" + (" by source" if run.epochs[1:] else ""))
    if warning := told_epochs(run.epochs):
        lines.append(f"warning     {warning}")
    lines.append(f"afterwards  {architectures.describe(model)}")
    lines += [
        f"tracker     {module} is not installed here; {INSTALL.format(name)}"
        for name, module in TRACKERS.items()
        if name in train.trackers and importlib.util.find_spec(module) is None
    ]
    return lines, data


def _on_this_machine(run: DeclaredRun, activations: float) -> tuple[str, str]:
    """A line about memory, and a refusal if the state is larger than this machine's memory."""
    state, available = memory.host_need(run), memory.host_memory()
    what = f"state and gradients {state / GIB:.2f} GiB, this machine has {available / GIB:.1f}"
    if state > available:
        return f"memory      {what}", (
            f"does not fit this machine: {what} GiB. Choose a smaller model or a pod, such as "
            'hardware "v6e-8"'
        )
    short = ", which may be too little: use more microbatches"
    line = f"memory      {what}; activations about {activations / GIB:.2f} GiB"
    return line + (short if state + activations > available else ""), ""


def _speed_here(
    run: DeclaredRun, resolved: ResolvedRun, learned: Learned, data: dict[str, Any]
) -> list[str]:
    """Lines about the time of a step, and of those that are left, on this machine's CPU."""
    data["predicted"] = learned.data
    left = ""
    if run.steps:
        seconds = _share_here(run, resolved, learned) * learned.step.seconds
        left = f", about {(run.steps - run.done) * seconds / 3600:.2f} h of steps"
    return [f"predicted   {learned.range}{left}", f"            {learned}"]


def _learned_here(run: DeclaredRun, resolved: ResolvedRun, learned: Learned) -> Ends | None:
    """Seconds of a mean step of those that are left, by the store's runs; None without any."""
    if not (run.steps and learned.runs):
        return None
    share, (low, middle, high) = _share_here(run, resolved, learned), ends(learned.step)
    return share * low, share * middle, share * high


def _share_here(run: DeclaredRun, resolved: ResolvedRun, learned: Learned) -> float:
    """`phases_share` on this machine's CPU."""
    chip = learned.hardware.device(resolved.largest.devices.count)
    return phases_share(run, resolved, learned.table, chip)


def _too_large(
    run: DeclaredRun, step: ResolvedPhase, lines: list[str], data: dict[str, Any]
) -> Facts:
    """A refusal, or a check by the compiler if the formula's error could make the step fit."""
    others = memory.nearest(run)
    data["fitting"] = others
    if not memory.fits(step, memory.CERTAIN):
        need, limit = step.estimate.total / GIB, memory.limit_of(step) / GIB
        why = f"does not fit {run.hardware.name} by formula: {need:.1f} of {limit:.2f} GiB per "
        none = "no smaller batch and no larger slice of this kind fits by formula"
        why += f"device, short by {need - limit:.1f}; "
        why += "\n  ".join(["these fit by formula:", *others]) if others else none
        return Facts(tuple(lines), data, why)
    examine = _examination(run)
    if examine is None:
        lines.append(
            "            the formula is at most 39 % above compiled peaks; the compiler was not run"
        )
        lines += [f"            fits by formula: {other}" for other in others]
    return Facts(tuple(lines), data, examine=examine)


def _speed(
    run: DeclaredRun, resolved: ResolvedPhase, learned: Learned, data: dict[str, Any]
) -> list[str]:
    step, train = learned.step, resolved.train
    shares = ", ".join(f"{kind} {part:.0%}" for kind, part in step.shares.items() if part >= 0.005)
    data["predicted"] = {
        **learned.data,
        "mfu_causal": step.mfu,
        "mfu_full_attention": step.mfu_full,
        "error_median": step_time.ERROR,
        "error_90": step_time.ERROR_90,
    }
    low, high = step_time.UNTUNED
    lines = [
        f"predicted   {learned.range}, MFU about {step.mfu:.0%} causal, {step.mfu_full:.0%} full "
        "attention",
        f"            shares of its time: {shares}; remat {train.remat}, {train.parallel.sharding}",
        f"            error on published runs, their source left out: median "
        f"{step_time.ERROR:.0%}, 90th percentile {step_time.ERROR_90:.0%} "
        f"(docs/predictions.md); untuned runs took {low:g} to {high:g} times the middle",
    ]
    if learned.runs:
        lines[-1] = f"            {learned}"
    length, kind = run.train.sequence_length, run.hardware.kind
    wasted = lint(run.model, train.parallel, platform=kind, sequence_length=length)
    return [*lines, *(f"            {sentence}" for sentence in wasted)]


def _program(step: ResolvedPhase, data: dict[str, Any]) -> list[str]:
    """The attention back end with its reason, and the options of the compiler."""
    chosen, options = step.backend, dict(step.options)
    data["program"] = {
        "attention": chosen.backend,
        "reason": chosen.reason,
        "compiler_options": options,
    }
    words = {n: str(v).lower() if isinstance(v, bool) else v for n, v in sorted(options.items())}
    named = ", ".join(f"{name}={value}" for name, value in words.items()) or "none"
    wrapped = textwrap.wrap(f"compiler options: {named}", 88, break_long_words=False)
    return [f"program     {chosen.reason}", *(f"            {line}" for line in wrapped)]


def _whole_run(
    run: DeclaredRun,
    resolved: ResolvedRun,
    learned: Learned,
    chip: Chip,
    data: dict[str, Any],
    lines: list[str],
) -> Work:
    """Adds hours and dollars; returns the predicted times of what is left."""
    train = resolved.largest.train
    fast, middle, slow = run_times(run, resolved, learned.table, chip, learned.step)
    data["run"] = {"fast": dataclasses.asdict(fast), "slow": dataclasses.asdict(slow)}
    extra = f"start {slow.start:.0f} s, checkpoints {slow.checkpoints:.0f} s, evaluations "
    extra += f"{slow.evaluations:.0f} s"
    if train.evaluate_batches == "all":
        extra += " (evaluation of whole splits is not counted)"
    lines += [
        f"run         {fast.total / 3600:.2f} to {slow.total / 3600:.2f} h of "
        f"{run.hardware.chips} {chip.name}: at the slow end {extra}",
        f"cost        {money(run, chip, (fast, slow))}",
    ]
    left = (run.steps or 0) - run.done
    low, mean, high = ((t.steps + t.evaluations) / max(left, 1) for t in (fast, middle, slow))
    save = save_seconds(run)
    return Work(steps=left, step=(low, mean, high), save=save, start=fast.start, restart=fast.start)


def _examination(run: DeclaredRun) -> Callable[[Callable[[str], None]], Facts] | None:
    """A check by the TPU compiler, which takes minutes; None for other hardware or no libtpu."""
    if run.hardware.kind != "tpu" or importlib.util.find_spec("libtpu") is None:
        return None
    return lambda show: compiled_facts(run, show)


def compiled_facts(run: DeclaredRun, show: Callable[[str], None]) -> Facts:
    """The TPU compiler's verdict on the memory of the run's largest step."""
    from training.preflight import check

    train = dataclasses.replace(run.train, steps=run.steps_compiled)
    found = check(run.model, run.optimizer, train, run.hardware.name, show)
    need = found["need_gib"] if found["peak_gib"] is None else found["peak_gib"]
    limit, sizes = found["limit_gib"], f"arguments {found['arguments_gib']:.2f}, temporaries "
    sizes += f"{found['temporaries_gib']:.2f} GiB"
    seconds, libtpu = found["compile_seconds"], found["versions"]["libtpu"]
    compiler = f"TPU compiler (libtpu {libtpu}, {seconds:.0f} s)"
    data = {"compiled": {name: found[name] for name in _KEPT}}
    if found["fits"]:
        line = f"memory      by the {compiler}: peak {need:.2f} of {limit:.2f} GiB, fits; {sizes}"
        return Facts((line, *_audited([Flaw(**each) for each in found["flaws"]])), data)
    over = f"needs {need:.2f} of {limit:.2f} GiB, short by {need - limit:.2f}; {sizes}"
    estimated = sum(found["estimate_gib"].values())
    others = memory.nearest(run, share=min(1.0, estimated / need))
    parts = sorted(found["estimate_gib"].items(), key=lambda part: -part[1])[:5]
    named = ", ".join(f"{part} {size:.1f}" for part, size in parts)
    why = [
        f"does not fit {run.hardware.name} by the {compiler}: {over}",
        f"  largest by formula, GiB: {named}",
        *(f"  fits by formula: {other}" for other in others),
    ]
    return Facts(data={**data, "fitting": others}, refusal="\n".join(why))


def _audited(flaws: list[Flaw]) -> list[str]:
    """The worst `_SHOWN` flaws in the compiled program, and what cures each kind."""
    if not flaws:
        return ["program     the audit of the compiled step finds nothing"]
    shown = flaws[:_SHOWN]
    kinds = dict.fromkeys(each.kind for each in shown)
    count = f"{len(shown)} of {len(flaws)} flaws" if len(flaws) > _SHOWN else "flaws"
    return [
        f"program     {count} in the compiled step, worst first; by bytes and FLOPs, never timed",
        *(f"  {each}" for each in shown),
        *(f"  against {kind!r}: {CURES[kind]}" for kind in kinds),
    ]


_SHOWN = 8
_KEPT = (
    *("fits", "limit_gib", "need_gib", "peak_gib", "arguments_gib", "temporaries_gib"),
    *("host_gib", "compile_seconds", "versions", "flaws"),
)
