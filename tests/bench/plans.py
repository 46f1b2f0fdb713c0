"""What `plan` says of the full experiments, beside what was published of the systems they are of.

    python -m tests.bench.plans            a JSON object for each plan
    python -m tests.bench.plans --write    docs/plans.md

By formula alone: no compiler is started, no source and no store is looked at.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import pod
from pipeline.graph.order import topological
from pipeline.plan.facts import state
from pipeline.prices import PRICES, price_of

PAGE = Path(__file__).parents[2] / "docs" / "plans.md"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the authors of a system state of a whole run.

    Attributes:
        what: hardware and settings.
        speed: tokens a second or seconds a step, and their MFU.
        rate: the same as tokens a second, from and to.
        apart: why the two are not the same thing.
    """

    what: str
    speed: str = ""
    rate: tuple[float, float] | None = None
    hours: str = ""
    dollars: str = ""
    apart: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A preset of an experiment, with settings that differ from it."""

    experiment: str
    preset: str = "full"
    settings: Mapping[str, Any] = field(default_factory=dict)
    published: Published | None = None

    @property
    def command(self) -> str:
        flags = [] if self.preset == "full" else [f"--{self.preset.replace('_', '-')}"]
        flags += [f"--{name} {value}" for name, value in self.settings.items()]
        return " ".join(["ponente plan", f"experiments/{self.experiment}.py", *flags])

    @property
    def label(self) -> str:
        """Short, for a table."""
        more = [] if self.preset == "full" else [self.preset]
        return ", ".join([self.experiment, *more, *self.settings.values()])


CASES = (
    Case(experiment="run_200m"),
    Case(experiment="run_200m", preset="published"),
    Case(experiment="run_200m", preset="dial"),
    Case(experiment="tpuchat_130m"),
    Case(
        experiment="tpuchat_130m",
        preset="published",
        published=Published(
            what="one v6e of Colab, 19,840 steps of 64 x 2,048",
            speed="434,932 tokens/s, MFU 46.5 % (full attention)",
            rate=(434_932, 434_932),
            hours="1.66 (its steps at that speed)",
            dollars="50 (a month of Colab)",
            apart="all in bfloat16, parameters included; here parameters are float32",
        ),
    ),
    Case(
        experiment="tpuchat_130m",
        preset="published",
        settings={"hardware": "v5e-1"},
        published=Published(
            what="one v5e",
            speed="148,829 tokens/s, 80.6 % of the matrix unit",
            rate=(148_829, 148_829),
        ),
    ),
    Case(experiment="nanopt_1b"),
    Case(
        experiment="nanopt_1b",
        preset="published",
        published=Published(
            what="8 H100",
            speed="MFU 40 % (6 N, padding counted as tokens)",
            hours="about 11 (a calculator's, with N = 1e9)",
            apart="13.0 h with its own 1,235,814,400 parameters; other hardware, see the next row",
        ),
    ),
    Case(
        experiment="nanopt_1b",
        preset="published",
        settings={"hardware": "8xh100", "evaluation-hardware": "1xh100"},
        published=Published(
            what="8 H100",
            speed="MFU 40 % (6 N, padding counted as tokens)",
            hours="about 11 (a calculator's, with N = 1e9)",
            apart="by its documents' lengths a quarter of what it counts is text (our estimate)",
        ),
    ),
    Case(experiment="nanochat_16k"),
    Case(
        experiment="nanochat_16k",
        preset="published",
        published=Published(
            what="spot v6e-4, rows of 16,384",
            speed="470,000 to 630,000 tokens/s, MFU 35 to 62 % (window-capped)",
            rate=(470_000, 630_000),
            dollars="1.70 an hour spot (its price list)",
            apart="its flash path computes all positions; here three layers of four see 8,192",
        ),
    ),
    Case(
        experiment="nanochat_16k",
        preset="v5e",
        published=Published(
            what="spot v5e-8, rows of 1,024",
            speed="about 175,000 tokens/s, MFU about 20 %",
            rate=(175_000, 175_000),
            dollars="2.04 an hour spot (its price list)",
        ),
    ),
    Case(
        experiment="tomat_200m",
        published=Published(
            what="v6e-16, 128 x 8,192, everything recomputed",
            speed="2.08 s a step, MFU 8.7 % (full attention)",
            rate=(128 * 8192 / 2.08, 128 * 8192 / 2.08),
            hours="4.62 (8,000 such steps)",
            dollars="85 at its $1.15 a chip and hour",
            apart="its own loss over densities, not cross-entropy",
        ),
    ),
    Case(
        experiment="tomat_1b",
        published=Published(
            what="v6e-32, 256 x 8,192, everything recomputed",
            speed="5.76 s a step, MFU 13.0 % (full attention)",
            rate=(256 * 8192 / 5.76, 256 * 8192 / 5.76),
            hours="25.6 (16,000 such steps)",
            dollars="942 at its $1.15 a chip and hour",
            apart="its own loss over densities, not cross-entropy",
        ),
    ),
    Case(experiment="tomat_1b", preset="lmq"),
    Case(
        experiment="tutorial_bytes",
        preset="published",
        settings={"hardware": "v6e-1"},
        published=Published(
            what="one device of a v2-8 or v3-8, 50,000 steps of 32 x 128",
            speed="59 steps a second",
            rate=(59 * 32 * 128, 59 * 32 * 128),
            hours="0.23, with 500 evaluations",
            apart="chips that are not in the table of hardware; the model is a little larger here",
        ),
    ),
)


def stated(case: Case) -> dict[str, Any]:
    """Facts of the first step of a case that trains, and its hardware."""
    experiment = importlib.import_module(f"experiments.{case.experiment}").experiment
    settings = {name.replace("-", "_"): value for name, value in case.settings.items()}
    nodes = topological(experiment.graph(case.preset, **settings))
    facts = state(nodes, {})
    for node in nodes:
        found = facts.get(node.key)
        if found is not None and "parameters" in found.data:
            hardware = experiment.settings(case.preset, **settings).hardware
            return {**found.data, "refusal": found.refusal, "hardware": hardware}
    raise ValueError(f"{case.command}: nothing trains")


def _span(low: float, high: float) -> str:
    digits = ",.0f" if low >= 100 else ".3g"
    return f"{low:{digits}} to {high:{digits}}"


def _money(facts: Mapping[str, Any]) -> tuple[str, str, str]:
    """Hours on demand, and dollars on demand and on spot, as `plan` counts them."""
    hardware = pod(facts["hardware"])
    price = price_of(hardware.generation)
    ends = [facts["run"][end] for end in ("fast", "slow")]
    hours = [sum(each.values()) / 3600 for each in ends]
    if price is None:
        return _span(*hours), "no public price", ""

    def dollars(each: float | None) -> str:
        if each is None:
            return ""
        low, high = (each * hardware.devices * hour for hour in hours)
        return f"${low:,.2f} to ${high:,.2f}"

    return _span(*hours), dollars(price.on_demand), dollars(price.spot)


def row(case: Case, facts: Mapping[str, Any]) -> str:
    """A row of the table of plans."""
    memory = facts["memory"]
    need, limit = memory["need_bytes"] / GIB, memory["limit_bytes"] / GIB
    verdict = "refused" if facts["refusal"] else "fits" if memory["fits"] else "to be compiled"
    cells = [case.label, facts["hardware"], f"{facts['parameters']:,}", _billions(facts["tokens"])]
    cells.append(f"{verdict}, {need:.1f} of {limit:.2f}")
    if "predicted" in facts:
        seconds = facts["predicted"]["step_seconds"]
        mfu = [facts["predicted"][name] for name in ("mfu_causal", "mfu_full_attention")]
        cells += [_span(seconds[0], seconds[-1]), " / ".join(f"{100 * each:.2g} %" for each in mfu)]
        cells += _money(facts)
    else:
        cells += [""] * 5
    theirs = facts.get("forecast", {}).get("published")
    names = ("bits_per_byte", "low", "high")
    loss = "{:.3f} ({:.3f} to {:.3f})".format(*(theirs[name] for name in names)) if theirs else ""
    cells.append(f"{loss}, {theirs['data'].partition(' ')[0]}" if theirs else "")
    return f"| {' | '.join(cells)} |"


def beside(case: Case, facts: Mapping[str, Any]) -> str:
    """A row of the table of published figures."""
    assert case.published is not None
    theirs = case.published
    predicted = facts.get("predicted")
    ours = ["", ""]
    if predicted is not None:
        rate = predicted["tokens_per_second"]
        speed = f"{_span(rate[0], rate[-1])} tokens/s, MFU {100 * predicted['mfu_causal']:.2g} % "
        speed += f"causal, {100 * predicted['mfu_full_attention']:.2g} % full attention"
        speed += _place(theirs.rate, rate)
        hours, dollars, _ = _money(facts)
        ours = [speed, f"{hours}; {dollars}"]
    totals = "; ".join(each for each in (theirs.hours, theirs.dollars) if each)
    cells = [case.label, theirs.what, theirs.speed, ours[0], totals, ours[1], theirs.apart]
    return f"| {' | '.join(cells)} |"


def _place(published: tuple[float, float] | None, predicted: list[float]) -> str:
    """Where the published speed lies beside the predicted range."""
    if published is None:
        return ""
    if published[1] < predicted[0]:
        return "; theirs is slower than the range"
    if published[0] > predicted[-1]:
        return "; theirs is faster than the range"
    return "; theirs is in the range"


def _billions(tokens: int) -> str:
    return f"{tokens / 1e9:.3g} billion" if tokens >= 1e9 else f"{tokens / 1e6:.3g} million"


HEAD = """# What `plan` says of the full experiments

Made by `python -m tests.bench.plans --write`. *Predicted* from shapes, and *published* by others:
this project has run none of them on a TPU or a GPU. Memory is GiB a chip, by formula; seconds,
hours and dollars are ranges from the 10th to the 90th percentile of
[the prediction's error on published runs](predictions.md). Hours and dollars are those
before preemptions, which `plan --spot` simulates. The loss is what *published* runs of the same
optimizer came to with as many FLOPs, in bits a byte (80 % interval): of FineWeb-edu in nanochat's
tokenizer, or of Paloma's c4_en after FineWeb-edu (Marin); there is none of AdamW and of
`tuned_muon`. Prices: {prices}.

"""
PUBLISHED = """
## Beside what was published

The conventions of MFU differ: *full attention* counts the whole square of scores, *causal* what the
mask lets through, *6 N* no attention at all. Two figures in one row are comparable only where they
have the same one. Where a total is in parentheses, it is our arithmetic with their figures.

"""


PLANS = (
    *("experiment", "hardware", "parameters", "tokens", "memory", "s a step"),
    *("MFU causal / full", "hours", "on demand", "spot", "loss"),
)
BESIDE = (
    *("experiment", "theirs: on what", "theirs: speed (published)", "ours (predicted)"),
    *("theirs: hours; dollars", "ours: hours; dollars (predicted)", "not the same"),
)


def _table(titles: tuple[str, ...], rows: list[str]) -> str:
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*head, *rows])


def page(found: list[tuple[Case, Mapping[str, Any]]]) -> str:
    """The whole of docs/plans.md."""
    known = "; ".join(
        f"{name}: {price.source}, {price.date}" for name, price in sorted(PRICES.items())
    )
    plans = _table(PLANS, [row(case, facts) for case, facts in found])
    published = _table(BESIDE, [beside(*each) for each in found if each[0].published is not None])
    commands = "\n".join(case.command for case, _ in found)
    return (
        f"{HEAD.format(prices=known)}{plans}\n{PUBLISHED}{published}\n\n"
        f"## Each plan by itself\n\n```sh\n{commands}\n```\n"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each case, or write the page."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--write", action="store_true", help="write docs/plans.md")
    write = flags.parse_args(arguments).write
    found = [(case, stated(case)) for case in CASES]
    if write:
        PAGE.write_text(page(found))
        return
    for case, facts in found:
        print(json.dumps({"measure": "plan", "command": case.command, **facts}, default=str))


if __name__ == "__main__":
    main()
