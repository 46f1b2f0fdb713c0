"""Plans with their hours and dollars: as flags, as lines of text, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from markupsafe import Markup

from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError
from pipeline.prices import Price, price_of
from steps.pages import page
from steps.pages.curves import COLOURS, Curve, chart
from steps.platforms import chip_of, devices_of
from steps.training.plan.cost import Bills, bills, ends, run_times
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.experience import Said
from steps.training.plan.memory import GIB, limit_of
from steps.tuning.search import Plan
from training.config import TrainConfig
from training.cost import step_time
from training.cost.resolved_run import resolve_run

UNPRICED = "no public price"
HEAD = ("hardware", "s per step", "hours", "dollars on demand", "GiB of a device")
_WIDTH, _LINES = 100, 5  # of a section in text


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan on its hardware; None where no layout divides, with the reason in `why`.

    `hours` are low, middle and high, none while the steps are not known; `dollars` the same by
    "on_demand" and "spot", those of them that have a price.
    """

    hardware: Hardware
    price: Price | None
    plan: Plan | None = None
    why: str = ""
    hours: Sequence[float] = ()
    dollars: Bills = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits and not self.why

    @property
    def time(self) -> float:
        """Hours of the run, or of a step where their number is not known."""
        assert self.plan is not None
        return self.hours[1] if self.hours else self.plan.step.seconds / 3600

    @property
    def cost(self) -> float | None:
        """Dollars on demand of `time`."""
        rate = None if self.price is None else self.price.on_demand
        return None if rate is None else rate * self.hardware.chips * self.time


def row(run: DeclaredRun, plan: Plan | None) -> Row:
    """The hours and dollars of a plan of the run on the run's hardware."""
    price, chip = price_of(run.hardware.generation), chip_of(run.hardware)
    found = Row(hardware=run.hardware, price=price, plan=plan)
    if plan is None:
        why = f"{run.train.batch_size} sequences do not divide over {run.hardware.devices} devices"
        return dataclasses.replace(found, why=why)
    new = plan.run.train
    if not (plan.fits and run.steps and chip) or new.batch_size != run.train.batch_size:
        return found
    chosen = {name: getattr(new, name) for name in ("microbatches", "remat", "parallel")}
    where = devices_of(run.hardware)
    try:
        whole = dataclasses.replace(run.whole, **chosen)
        resolved = resolve_run(plan.candidate.model, run.optimizer, whole, where, done=run.done)
    except InputError as error:  # of a smaller phase
        return dataclasses.replace(found, why=str(error))
    times = run_times(run, resolved, plan.learned.table, chip, plan.step)
    dollars = bills(run.hardware, price, times)
    return dataclasses.replace(found, hours=[each.total / 3600 for each in times], dollars=dollars)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows by the title of their section, and the chosen ones by what distinguishes them.

    `words` are the experiment's file, preset and settings on a command line; `said` is what the
    store's runs on each chip say.
    """

    label: str
    run: DeclaredRun  # as declared
    settings: Any
    words: tuple[str, ...]
    said: Mapping[str, Sequence[Said]]
    sections: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    chosen: Mapping[str, Row] = field(default_factory=dict)
    tried: str = "the fastest layout of each by formula"

    def flags(self, row: Row) -> list[str]:
        """The command-line words that change the declared run to the row: --flag, value, ..."""
        pairs = [] if row.plan is None else self._differences(row, row.plan)
        return [w for name, to in pairs for w in (f"--{name.replace('_', '-')}", str(to))]

    def command(self, row: Row) -> str:
        """The command that runs the experiment so; its flags replace given ones."""
        more, kept, dropping = self.flags(row), [], False
        for word in self.words:
            if word.startswith("--"):
                dropping = word.partition("=")[0] in more
            if not dropping:
                kept.append(word)
        return shlex.join(["ponente", "run", *kept, *more])

    def _differences(self, row: Row, plan: Plan) -> Iterator[tuple[str, Any]]:
        """(dotted name, value) of every setting that differs from the declared run."""
        training = self._only(lambda value: isinstance(value, TrainConfig)) or "training"
        model = self._only(lambda value: isinstance(value, TransformerConfig)) or "model"
        new, old, at = plan.run.train, self.run.train, f"{training}.parallel"
        if (on := row.hardware.name) != self.run.hardware.name:
            yield self._only(lambda value: value == self.run.hardware.name) or "hardware", on
        yield from _changed(training, ("batch_size", "microbatches", "remat"), new, old)
        layout = ("sharding", "sequence", "tensor")
        # "auto" comes to the same; another one could be that of another layout.
        layout += () if old.parallel.reduce == "auto" else ("reduce",)
        yield from _changed(at, layout, new.parallel, old.parallel)
        if new.parallel.optimizer_memory == "host" != old.parallel.optimizer_memory:
            yield f"{at}.optimizer_memory", "host"
        heads = ("heads", "kv_heads", "head_size")
        yield from _changed(model, heads, plan.candidate.model, self.run.model)

    def _only(self, fits: Callable[[Any], bool]) -> str | None:
        """Name of the only setting with such a value; None if there are none or several."""
        names = [f.name for f in dataclasses.fields(self.settings)]
        names = [name for name in names if fits(getattr(self.settings, name))]
        return names[0] if len(names) == 1 else None

    def head(self) -> list[str]:
        about = f"{self.label}, declared for {self.run.hardware.name}: {self.tried}"
        error = f"median error {step_time.ERROR:.0%} on published runs"
        runs = [f"{len(found)} on {chip}" for chip, found in self.said.items() if found]
        by = (
            f"corrected by runs of this store: {', '.join(runs)}"
            if runs
            else "no runs to correct it"
        )
        return [about, f"80 % intervals; {error}, {by}"]

    def notes(self) -> list[str]:
        """Where the prices are from, chips of one source together, and what they leave out."""
        found: dict[str, dict[str, None]] = {}
        for each in itertools.chain(*self.sections.values()):
            price = each.price
            where = UNPRICED if price is None else f"{price.source}, {price.date}"
            found.setdefault(where, {})[each.hardware.generation] = None
        return [
            *(f"price of {', '.join(names)}: {where}" for where, names in found.items()),
            "spot, in --json and --html, is before preemptions; the "
            "order of rows whose intervals overlap is not certain",
        ]

    def lines(self) -> list[str]:
        found, alone = self.head(), len(self.sections) == 1
        for title, rows in self.sections.items():
            shown = rows if alone else rows[:_LINES]
            table = [[*HEAD, ""], *map(self.cells, shown)]
            wide = [max(map(len, column)) for column in zip(*table, strict=True)]
            found += [] if alone else [f"{title}:"]
            more = ["", *(" ".join(self.flags(each)) or "as declared" for each in shown)]
            for line, settings in zip(table, more, strict=True):
                text = "  ".join(c.ljust(w) for c, w in zip(line[:-1], wide, strict=False))
                fits = len(text) + len(line[-1]) + 2 <= _WIDTH
                found.append(f"{text}  {line[-1] if fits else ''}".rstrip())
                found += [] if fits else _wrapped(line[-1], "    ")
                found += [] if alone else _wrapped(settings, "    ")
        for title, each in self.chosen.items():
            found += [f"{title}:", f"  {self.command(each)}"]
        found += [] if self.chosen else ["nothing fits: choose a smaller batch or more chips"]
        return [*found, *(part for note in self.notes() for part in _wrapped(note))]

    def cells(self, row: Row) -> list[str]:
        """The columns of `HEAD`, and what is wrong with the row, or what it is chosen for."""
        plan = row.plan
        if plan is None:
            return [row.hardware.name, "", "", "", "", row.why]
        step, need, limit = plan.step, plan.bytes / GIB, limit_of(plan.run) / GIB
        size, remark = f"{need:.1f} of {limit:.2f}", " and ".join(self._chosen_as(row))
        if (verdict := plan.compiled) is not None:
            peak = verdict["need_gib"] if verdict["peak_gib"] is None else verdict["peak_gib"]
            size = "does not compile" if peak is None else f"{peak:.1f} of {limit:.2f} compiled"
        if not row.fits:
            short = "refused" if verdict is not None else f"short by {need - limit:.1f} GiB"
            remark = row.why or short
        dollars = UNPRICED if row.price is None else _span(row.dollars.get("on_demand", ()))
        seconds = _span(ends(step))
        return [row.hardware.name, seconds, _span(row.hours), dollars, size, remark]

    def _chosen_as(self, row: Row) -> list[str]:
        return [what for what, each in self.chosen.items() if each is row]

    def data(self) -> dict[str, Any]:
        sections = self.sections.items()
        rows = [{"section": title, **self._plain(row)} for title, rows in sections for row in rows]
        declared = self.run.hardware.name
        runs = {chip: len(found) for chip, found in self.said.items()}
        about = {"step": self.label, "declared": declared, "tried": self.tried, "learned": runs}
        return {**about, "rows": rows}

    def _plain(self, row: Row) -> dict[str, Any]:
        """The same row as JSON; triples are low, middle and high."""
        plan, on = row.plan, row.hardware
        found: dict[str, Any] = {
            "hardware": on.name,
            "chip": on.generation,
            **{name: getattr(on, name) for name in ("chips", "devices", "slices")},
            "fits": row.fits,
            "why": row.why,
            "chosen": self._chosen_as(row),
            "price": None if row.price is None else msgspec.structs.asdict(row.price),
        }
        if plan is None:
            return found
        step, need, limit = plan.step, int(plan.bytes), int(limit_of(plan.run))
        return {
            **found,
            **{"need_bytes": need, "limit_bytes": limit, "short_bytes": max(0, need - limit)},
            "step_seconds": list(ends(step)),
            **{"tokens_per_second": step.tokens / step.seconds, "shares": step.shares},
            **{"mfu_causal": step.mfu, "mfu_full_attention": step.mfu_full},
            **{"hours": list(row.hours) or None, "dollars": row.dollars},
            "changes": plan.candidate.changes or "nothing",
            **{"flags": self.flags(row), "command": self.command(row)},
            "compiled": None if plan.compiled is None else dict(plan.compiled),
        }

    def page(self) -> str:
        """The chosen commands, a chart, and the sections."""
        return page.render(
            "hardware",
            title=f"Hardware for {self.label}",
            head=self.head(),
            chosen=[(title, self.command(each)) for title, each in self.chosen.items()],
            charts=[("By hours", self._chart())],
            tables=[(title, self._marked(rows)) for title, rows in self.sections.items()],
            notes=self.notes(),
        )

    def _marked(self, rows: Sequence[Row]) -> list[list[str]]:
        table = [[*HEAD, "dollars on spot", "", "settings that differ from the declared"]]
        for each in rows:
            name, *cells, remark = self.cells(each)
            name = page.Best(name) if self._chosen_as(each) else name
            spot, settings = _span(each.dollars.get("spot", ())), " ".join(self.flags(each))
            table.append([name, *cells, spot, remark, settings or "none"])
        return table

    def _chart(self) -> Markup:
        """Dollars on demand by hours, or for the layouts of one hardware memory by hours."""
        alone = len(self.sections) == 1
        every = itertools.chain(*self.sections.values())
        groups = {row.hardware.name: [row] for row in every} if alone else self.sections
        y_label, curves = "dollars on demand" if alone else "GiB of a device", []
        for (title, rows), colour in zip(groups.items(), itertools.cycle(COLOURS), strict=False):
            shown = [row for row in rows if row.fits and (row.cost or not alone)]
            timed = [row for row in shown if row.hours]  # else all in hours of a step
            shown = timed or shown
            y = [row.cost or 0.0 if alone else row.plan.bytes / GIB for row in shown if row.plan]
            name = title.partition(",")[0].partition(":")[0]
            curves += [Curve(name, [row.time for row in shown], y, colour, "points")] if y else []
        return chart(curves, y_label, "hours, predicted", from_zero="xy")


def _changed(prefix: str, names: tuple[str, ...], new: Any, old: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        if (value := getattr(new, name)) != getattr(old, name):
            yield f"{prefix}.{name}", value


def _span(values: Sequence[float]) -> str:
    """The middle with the interval's ends, such as "12.5 (10-15)"; empty where not known."""
    if not values:
        return ""
    low, middle, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values)
    return f"{middle} ({low}-{high})"


def _wrapped(text: str, before: str = "") -> list[str]:
    how = {"initial_indent": before, "subsequent_indent": f"{before}  "}
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, **how)
