"""Search the settings of a train step: by formula, then with the TPU compiler for the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError
from steps.platforms import chip_of
from steps.training.plan import experience
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.experience import Learned, Said, corrected
from steps.training.plan.memory import CERTAIN, fits, step_on
from training.config import TrainConfig
from training.cost.memory_plan import SHARDINGS
from training.cost.resolved_run import ResolvedPhase
from training.cost.step_time import Forecast
from training.preflight import check

NOTHING, ROUNDING, TRAINING, MODEL = "", "rounding", "training", "model"
CHANGES = {
    NOTHING: "the same output",
    ROUNDING: "the same training, gradients summed in another order",
    TRAINING: "another batch: another training",
    MODEL: "another model, with as many weights in heads of another size",
}
"""Effects of settings on a run; each kind includes those before it."""

_HEAD_SIZES = (64, 128, 256)
_MICROBATCHES = (1, 2, 4, 8, 16, 32)
_MESHES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
"""(sequence, tensor): devices that positions are split among, and devices for heads and MLP."""
_TILE = 256
"""Positions per device are a multiple of this if they are split: two chunks of 128 lanes."""
_SAVING = 0.03  # share of memory
_AT_ONCE = 2
"""Concurrent compilations; each takes a core for minutes and gigabytes of memory."""


class Candidate(NamedTuple):
    """Settings of a train step but for its remat policy, and which of `CHANGES` they make."""

    model: TransformerConfig
    train: TrainConfig
    changes: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate, resolved, with its predicted step and, if it was compiled, the verdict."""

    candidate: Candidate
    run: ResolvedPhase
    learned: Learned
    compiled: Mapping[str, Any] | None = None

    @property
    def step(self) -> Forecast:
        return self.learned.step

    @property
    def seconds_per_token(self) -> float:
        """Of the whole slice, comparable between batch sizes."""
        return self.step.seconds / self.step.tokens

    @property
    def bytes(self) -> float:
        """Bytes of one device, by formula."""
        return self.run.estimate.total

    @property
    def fits(self) -> bool:
        """Whether the plan fits, by the compiler if it was compiled, else by formula."""
        return fits(self.run) if self.compiled is None else bool(self.compiled["fits"])


@dataclass(frozen=True, kw_only=True)
class Search:
    """The plan of the declared run, if its sizes divide, and the `front` of each of `CHANGES`.

    With the numbers of candidates, and of their plans that fit by formula.
    """

    declared: Plan | None
    plans: Sequence[Plan]
    tried: int
    fitting: int

    def front(self, changes: str) -> list[Plan]:
        return [plan for plan in self.plans if plan.candidate.changes == changes]

    def best(self, changes: str, *, certain: bool = True) -> Plan | None:
        """The fastest plan that fits and changes no more than `changes`.

        `certain` leaves out plans that are above the limit by formula and were not compiled.
        """
        kinds = [*CHANGES]
        plans = [plan for kind in kinds[: kinds.index(changes) + 1] for plan in self.front(kind)]
        found = [plan for plan in plans if plan.fits or (not certain and not plan.compiled)]
        return min(found, key=lambda plan: plan.seconds_per_token, default=None)

    def chosen(self) -> dict[str, Plan]:
        """The best plans by `CHANGES`, each faster than the plans that change less."""
        found: dict[str, Plan] = {}
        for kind in CHANGES:
            plan = self.best(kind)
            if plan is not None and plan not in found.values():
                found[kind] = plan
        return found


def search(
    run: DeclaredRun,
    batches: Sequence[int] = (),
    *,
    uncertain: bool = False,
    said: Sequence[Said] = (),
) -> Search:
    """Predict memory and time of all candidates by formula, and keep the fastest.

    `uncertain` keeps plans above the limit by formula that the compiler may find to fit; `said` is
    what runs on the hardware say, by which times are corrected.
    """
    most = CERTAIN if uncertain else 1.0
    tried, kept = 0, []
    for candidate in candidates(run, batches):
        tried += 1
        plans = _recomputing(run, candidate, said)
        kept += [plan for plan in plans if fits(plan.run, most)]
    own = _plan(run, Candidate(run.model, run.train, NOTHING), run.train.remat, said)
    fronts = (front(p for p in kept if p.candidate.changes == kind) for kind in CHANGES)
    plans, fitting = [*itertools.chain(*fronts)], sum(fits(plan.run) for plan in kept)
    return Search(declared=own, plans=plans, tried=tried, fitting=fitting)


def fastest(run: DeclaredRun, said: Sequence[Said] = ()) -> Plan | None:
    """The fastest plan of the declared model and batch that fits by formula, else the smallest.

    None if no layout divides. It is `search(...).best(ROUNDING)` in a tenth of the time: those that
    are slower without recomputation than a plan that fits are not resolved.
    """
    same = itertools.takewhile(lambda c: c.changes in (NOTHING, ROUNDING), candidates(run))
    least = [plan for each in same if (plan := _plan(run, each, "matmuls", said)) is not None]
    best = smallest = None
    for bound in sorted(least, key=lambda plan: plan.step.seconds):
        if best is not None and bound.step.seconds >= best.step.seconds:
            break
        plan = bound if bound.fits else _plan(run, bound.candidate, "auto", said)
        if plan is None:
            continue
        if plan.fits and (best is None or plan.step.seconds < best.step.seconds):
            best = plan
        if smallest is None or plan.bytes < smallest.bytes:
            smallest = plan
    return best or smallest


def candidates(run: DeclaredRun, batches: Sequence[int] = ()) -> Iterator[Candidate]:
    """Every candidate whose sizes divide."""
    train = run.train
    found = itertools.product(
        _models(run.model),
        (train.batch_size, *(b for b in batches if b != train.batch_size)),
        sorted({train.microbatches, *_MICROBATCHES}),
        _MESHES,
        SHARDINGS,
    )
    for model, batch, parts, (sequence, tensor), sharding in found:
        if batch % parts or train.sequence_length % sequence:
            continue
        parallel = replace(
            train.parallel, sharding=sharding, sequence=sequence, tensor=tensor, reduce="auto"
        )
        tried = replace(train, batch_size=batch, microbatches=parts, parallel=parallel)
        if not _divides(model, tried, run.hardware):
            continue
        changes = NOTHING if parts == train.microbatches else ROUNDING
        changes = changes if batch == train.batch_size else TRAINING
        changes = changes if model == run.model else MODEL
        yield Candidate(model, tried, changes)


def _models(model: TransformerConfig) -> list[TransformerConfig]:
    """The model, and variants with other head sizes and the same parameters in every layer."""
    found = [model]
    for size in _HEAD_SIZES:
        heads, left = divmod(model.heads * model.head_size, size)
        kv_heads, kv_left = divmod(model.kv_heads * model.head_size, size)
        fits = not left and not kv_left and kv_heads and not heads % kv_heads
        if size != model.head_size and fits:
            found.append(replace(model, heads=heads, kv_heads=kv_heads, head_size=size))
    return found


def _divides(model: TransformerConfig, train: TrainConfig, hardware: Hardware) -> bool:
    """Whether the mesh divides devices, batch, positions and features evenly."""
    sequence, tensor = train.parallel.sequence, train.parallel.tensor
    rows, left = divmod(hardware.devices // hardware.slices, sequence * tensor)
    rows *= hardware.slices
    if left or not rows or train.batch_size % (train.microbatches * rows):
        return False
    if sequence > 1 and train.sequence_length % (sequence * _TILE):
        return False
    sizes = (model.heads, model.kv_heads, model.mlp, model.padded_vocab_size)
    return not any(size % tensor for size in sizes)


def _recomputing(run: DeclaredRun, candidate: Candidate, said: Sequence[Said]) -> Iterator[Plan]:
    """The candidate under several remat policies, from the least recomputation to the most."""
    least = _plan(run, candidate, "matmuls", said)  # keeps all matmuls
    if least is not None:
        yield least
    for remat in ("attention", "full") if least and least.fits else ("auto", "full"):
        if (plan := _plan(run, candidate, remat, said)) is not None:
            yield plan


def _plan(
    run: DeclaredRun, candidate: Candidate, remat: str, said: Sequence[Said] = ()
) -> Plan | None:
    """The plan of a candidate under a remat policy; None if its sizes do not divide."""
    parallel = candidate.train.parallel
    if parallel.optimizer_memory == "auto" and remat != "auto":
        parallel = replace(parallel, optimizer_memory="device")
    train = replace(candidate.train, remat=remat, parallel=parallel)
    try:
        found = step_on(run.hardware, candidate.model, run.optimizer, train)
    except InputError:
        return None
    chip = chip_of(run.hardware)
    assert chip is not None
    learned = corrected(found, experience.Hardware.of(chip.name), said)
    return Plan(candidate=candidate, run=found, learned=learned)


def front(plans: Iterable[Plan]) -> list[Plan]:
    """The Pareto front of time and memory, the fastest first, each with `_SAVING` less memory."""
    found: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds_per_token, plan.bytes)):
        if not found or plan.bytes < (1 - _SAVING) * found[-1].bytes:
            found.append(plan)
    return found


def compile_fastest(
    search: Search, run: DeclaredRun, most: int, show: Callable[[str], None]
) -> Search:
    """The search with the compiler's verdict on the fastest plan of each kind.

    Where one does not fit, the next is compiled. `show` gets progress, from several threads.
    """

    def compiled(plan: Plan) -> Plan:
        train = replace(plan.run.train, steps=run.steps_compiled)
        try:
            verdict = check(plan.candidate.model, run.optimizer, train, run.hardware.name, show)
        except InputError as error:  # the compiler failed and reports no memory
            show(str(error))
            verdict = {"fits": False, "peak_gib": None, "need_gib": None, "error": str(error)}
        return replace(plan, compiled=verdict)

    count = 0
    while count < most:
        best = [search.best(kind, certain=False) for kind in CHANGES]
        unknown = {id(plan): plan for plan in best if plan and plan.compiled is None}
        wanted = list(unknown.values())[: most - count]
        if not wanted:
            break
        count += len(wanted)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            new = dict(zip(map(id, wanted), threads.map(compiled, wanted), strict=True))
        search = replace(search, plans=[new.get(id(plan), plan) for plan in search.plans])
    return search
