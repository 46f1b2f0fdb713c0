"""`plan --on`: what is searched, what is chosen, and the flags that it is written as."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InputError, cli, pod
from pipeline.accelerators import GPUS, TPUS
from pipeline.cli import options
from pipeline.errors import UsageError
from pipeline.graph.declaration import load_experiment, nodes
from pipeline.graph.order import topological
from pipeline.prices import PRICES
from steps.training.plan import memory
from steps.training.plan.declared_run import declared_run
from steps.training.plan.facts import training_facts
from steps.tuning import search as module
from steps.tuning import table
from steps.tuning.compare import like
from steps.tuning.search import (
    MODEL,
    NOTHING,
    ROUNDING,
    TRAINING,
    candidates,
    compile_fastest,
    fastest,
    front,
    search,
)

ROOT = Path(__file__).parents[3]
FILE = str(ROOT / "experiments" / "tomat_200m.py")


def train_node(*flags, file=FILE):
    """The node that trains of the experiment under some flags."""
    experiment = load_experiment(file)
    _, _, settings = options.parse("plan", list(flags), experiment, "plan")
    order = topological(nodes(experiment.build(settings)))
    return next(node for node in order if "optimizer" in node.config)


def plan(*arguments, file=FILE):
    """What `ponente plan` prints."""
    said, words = io.StringIO(), ["plan", file, "--prefix", "/nowhere", *arguments]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["ponente", *words])
        assert cli._command(words, {}) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def declared():
    """The run as it is declared."""
    return declared_run(train_node(), {})


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """(the declared layout, the chosen ones by what they change, the page) for one hardware."""
    page = tmp_path_factory.mktemp("on") / "page.html"
    arguments = ["--on", "v6e-16", "--batches", "64", "--json", "--html", str(page)]
    own, *rows = json.loads(plan(*arguments))["rows"]
    assert (own["section"], own["chosen"]) == ("as declared", [])
    return own, {row["changes"]: row for row in rows if row["chosen"]}, page.read_text()


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """(rows of the JSON by hardware, the page) for all chips."""
    page = tmp_path_factory.mktemp("on") / "page.html"
    found = json.loads(plan("--on", "all,v5e-1,3xv6e-8", "--json", "--html", str(page)))
    assert found["declared"] == "v6e-16"
    return {row["hardware"]: row for row in found["rows"]}, page.read_text()


def test_every_chip_has_a_row_in_as_many_chips(every):
    """With the cheapest and the fastest of those that fit, by brute force over the rows."""
    rows, page = every
    asked = {name: row for name, row in rows.items() if name not in ("v5e-1", "3xv6e-8")}
    assert {row["chip"] for row in asked.values()} == {*TPUS, *GPUS}
    assert {row["chips"] for row in asked.values()} == {16}
    assert rows["v7x-32"]["devices"] == 32
    fitting = [row for row in rows.values() if row["fits"]]
    assert all(row["need_bytes"] <= row["limit_bytes"] for row in fitting)
    quick = min(fitting, key=lambda row: row["hours"][1])
    priced = [row for row in fitting if row["chip"] in PRICES]
    cheap = min(priced, key=lambda row: row["dollars"]["on_demand"][1])
    marked = {mark: row["hardware"] for row in rows.values() for mark in row["chosen"]}
    assert marked == {"fastest": quick["hardware"], "cheapest": cheap["hardware"]}
    text = re.sub(r"<[^>]*>", "", page)
    assert quick["command"] in text
    assert cheap["command"] in text
    assert page.count('class="best"') == 2
    assert "<svg" in page


def test_the_bill_is_that_of_the_chips(every):
    """Hours x chips x the price of one; none for v7x, which has no public price."""
    rows, _ = every
    for row in rows.values():
        if not row["fits"]:
            continue
        price = PRICES.get(row["chip"])
        assert (price is None) == (row["chip"] == "v7x") == (row["price"] is None)
        bill = row["dollars"].get("on_demand")
        if price is None:
            assert row["dollars"] == {}
            continue
        expected = [price.on_demand * row["chips"] * hours for hours in row["hours"]]
        assert bill == pytest.approx(expected)
        assert bill == sorted(bill)
        assert ("spot" in row["dollars"]) == (price.spot is not None)


@pytest.mark.parametrize("hardware", ["v6e-16", "v7x-32", "2x8xh100"])
def test_the_command_plans_what_the_row_says(every, hardware):
    """`plan` of the same settings, by the real parser: seconds, memory, hours."""
    row = every[0][hardware]
    program, verb, file, *flags = shlex.split(row["command"])
    assert (program, verb, file) == ("ponente", "run", FILE)
    stated = training_facts(train_node(*flags), {}).data
    assert stated["predicted"]["step_seconds"] == pytest.approx(row["step_seconds"])
    assert stated["memory"]["need_bytes"] == pytest.approx(row["need_bytes"], abs=1)
    ends = []
    for end in ("fast", "slow"):
        parts = stated["run"][end]
        ends.append(sum(parts[n] for n in ("steps", "start", "checkpoints", "evaluations")) / 3600)
    assert ends == pytest.approx([row["hours"][0], row["hours"][2]])


def test_what_does_not_fit_says_by_how_much(every):
    """24 devices cannot share 128 sequences; one v5e is short even with all offloaded."""
    rows, _ = every
    assert not rows["3xv6e-8"]["fits"]
    assert "128 sequences do not divide over 24 devices" in rows["3xv6e-8"]["why"]
    large = str(ROOT / "experiments" / "tomat_1b.py")
    found = json.loads(plan("--on", "v5e-1,v6e-32", "--json", file=large))["rows"]
    small, own = found
    assert (small["fits"], own["fits"]) == (False, True)
    assert small["short_bytes"] == small["need_bytes"] - small["limit_bytes"] > 0
    assert small["hours"] is None
    assert own["chosen"] == ["cheapest", "fastest"]
    text = plan("--on", "v5e-1,v6e-32", file=large)
    assert f"short by {small['short_bytes'] / 2**30:.1f} GiB" in text


def test_the_table_fits_a_terminal():
    """All but the commands, which are to be copied."""
    lines = plan("--on", "v6e,v7x,h100").splitlines()
    assert max(len(line) for line in lines if "ponente run" not in line) <= 100
    assert sum("ponente run" in line for line in lines) == 2
    assert "no public price" in next(line for line in lines if line.startswith("v7x-32"))


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["v6e-8", "8xa100"])
def test_the_fastest_is_that_of_all_layouts(hardware):
    """By brute force: every layout under every remat policy that the search tries."""
    file = str(ROOT / "experiments" / "nanopt_1b.py")
    run = declared_run(train_node("--hardware", hardware, file=file), {})
    found = fastest(run)
    seconds = [
        made.step.seconds
        for each in candidates(run)
        if each.changes in (NOTHING, ROUNDING)
        for remat in ("matmuls", "attention", "full", "auto")
        if (made := module._plan(run, each, remat)) is not None and made.fits
    ]
    assert found.fits
    assert found.step.seconds == pytest.approx(min(seconds), rel=1e-3)


@given(st.sampled_from([*TPUS.values(), *GPUS.values()]), st.sampled_from([*TPUS.values()]))
def test_as_many_chips_or_the_fewest_above(chip, other):
    """Of every slice of every generation, and of two: no smaller name would do."""
    for name in other.names:
        for declared in (pod(name), pod(f"2x{name}")):
            found = pod(like(chip, declared))
            assert found.generation == chip.name
            assert found.chips >= declared.chips
            if chip.name in TPUS:
                assert found.slices >= declared.slices
                below = [n for n in chip.names.values() if n < found.chips // found.slices]
                assert all(n * found.slices < declared.chips for n in below)
            else:
                assert found.chips - declared.chips < 8
                assert found.chips == declared.chips or declared.chips > 8
    least = min(chip.names, key=chip.names.get) if chip.name in TPUS else f"1x{chip.name}"
    assert like(chip, pod("local")) == least


points = st.tuples(st.integers(1, 9), st.integers(1, 10**6))


@given(st.lists(points, max_size=12))
def test_no_plan_outside_the_front_is_better(values):
    """For each there is one in the front as fast, with at most 3 % more memory."""
    plans = [SimpleNamespace(seconds_per_token=s, bytes=b) for s, b in values]
    kept = front(plans)
    assert [p.seconds_per_token for p in kept] == sorted(p.seconds_per_token for p in kept)
    for slower, faster in zip(kept[1:], kept, strict=False):
        assert slower.bytes < 0.97 * faster.bytes
    for each in plans:
        as_fast = [p for p in kept if p.seconds_per_token <= each.seconds_per_token]
        assert min(p.bytes for p in as_fast) * 0.97 <= each.bytes


def test_candidates_divide_and_say_what_they_change(declared):
    """Devices, rows and heads come out even; other heads have as many weights."""
    tried = list(candidates(declared, (64,)))
    assert {c.changes for c in tried} == {NOTHING, ROUNDING, TRAINING, MODEL}
    for candidate in tried:
        train, model = candidate.train, candidate.model
        data, group, sequence, tensor = train.parallel.mesh_shape(declared.hardware.devices)
        assert train.batch_size % (data * group * train.microbatches) == 0
        assert model.kv_heads % tensor == 0
        assert train.sequence_length % sequence == 0
        assert model.matmul_parameters == declared.model.matmul_parameters
        alike = (model == declared.model, train.batch_size == declared.train.batch_size)
        assert alike == (candidate.changes != MODEL, train.batch_size == 128)


def test_rows_of_a_length_that_does_not_divide_are_compared(declared):
    """Integers of 257 numbers: no devices share a row, and every other layout is tried."""
    given = replace(declared, train=replace(declared.train, sequence_length=257))
    assert {each.train.parallel.sequence for each in candidates(given)} == {1}


def test_a_layout_that_a_smaller_phase_cannot_have_says_so(declared):
    """Of twelve sequences, which eight microbatches do not divide; the later ones have 64."""
    train = replace(declared.train, steps=100, batch_size=64, microbatches=8)
    whole = replace(train, batch_size=12, microbatches=1, batch_schedule=((50, 64),))
    settings = {"train": train, "whole": whole, "steps": 100, "hardware": pod("v6e-1")}
    run = replace(declared, **settings)
    same = next(each for each in candidates(run) if each.changes == NOTHING)
    found = table.row(run, module._plan(run, same, "full"))
    assert "batch_size 12 is not divisible by microbatches 8" in found.why
    assert not found.fits


def test_a_run_that_reduces_once_is_compared_with_those_that_cannot(declared):
    """`reduce` is "auto" in every candidate; sharding "fsdp" would refuse "step"."""
    parallel = replace(declared.train.parallel, sharding="zero1", reduce="step")
    given = replace(declared, train=replace(declared.train, parallel=parallel))
    usual, tried = (list(candidates(run, (64,))) for run in (declared, given))
    assert len(tried) == len(usual)
    assert {each.train.parallel.reduce for each in tried} == {"auto"}


@pytest.mark.slow
def test_commands_make_the_plans_and_keep_the_key_where_nothing_changes(layouts):
    """The printed command is parsed by the real parser: it declares what was predicted."""
    _, chosen, _ = layouts
    keys = {}
    for changes, found in chosen.items():
        program, verb, file, *flags = shlex.split(found["command"])
        assert (program, verb, file) == ("ponente", "run", FILE)
        node = train_node(*flags)
        keys[changes] = node.key
        run = declared_run(node, {})
        step = memory.step_on(run.hardware, run.model, run.optimizer, run.train)
        assert int(step.estimate.total) == found["need_bytes"]
        assert step.train.remat != "auto"
    own = train_node().key
    assert keys["nothing"] == own
    assert own not in {key for changes, key in keys.items() if changes != "nothing"}


@pytest.mark.slow
def test_each_choice_is_faster_than_one_that_changes_less(layouts):
    """And fits; of the front it is the fastest. Heads of 256 are what pays on a v6e."""
    own, chosen, page = layouts
    speeds = [found["tokens_per_second"] for found in chosen.values()]
    assert speeds == sorted(speeds)
    assert all(p["need_bytes"] <= p["limit_bytes"] for p in chosen.values())
    assert speeds[0] >= own["tokens_per_second"]
    assert "--model.head-size 256" in chosen["model"]["command"]
    text = re.sub(r"<[^>]*>", "", page)
    assert "<svg" in page
    assert all(found["command"] in text for found in chosen.values())


@pytest.mark.slow
def test_the_screen_names_every_choice():
    """A table for each kind of change and the commands; flags given before are replaced."""
    shown = plan("--on", "v6e-8", "--training.microbatches", "4")
    assert "as declared:" in shown
    assert "the same output:" in shown
    lines = shown.strip().splitlines()
    assert max(len(line) for line in lines if "ponente run" not in line) <= 100
    last = [line for line in lines if "ponente run" in line][-1]
    assert last.count("--training.microbatches") == 1
    assert "--hardware v6e-8" in last


@pytest.mark.slow
def test_the_next_is_asked_where_the_compiler_refuses(declared, monkeypatch):
    """And what it refused is not chosen."""
    asked = []

    def check(model, optimizer, train, slice_name, show):
        del show
        optimizer.phases(train.steps)
        asked.append((model, train))
        fits = train.microbatches >= 2
        return {"fits": fits, "peak_gib": 20.0 if fits else None, "need_gib": 40.0}

    monkeypatch.setattr("steps.tuning.search.check", check)
    tried = search(declared, uncertain=True)
    after = compile_fastest(tried, declared, 6, lambda _: None)
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)
    chosen = after.chosen()
    assert chosen[ROUNDING].compiled == {"fits": True, "peak_gib": 20.0, "need_gib": 40.0}
    assert after.best(MODEL).run.train.microbatches >= 2
    assert all(train.steps for _, train in asked)
    # Any warmup fits where the number of steps is not known yet.
    slow = replace(declared, steps=None, optimizer=replace(declared.optimizer, warmup=2000))
    (plan,) = (each for each in compile_fastest(tried, slow, 1, str).plans if each.compiled)
    assert "error" not in plan.compiled


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--on", "cpu-2x2"], "cpu-2x2: expected chips whose time is predicted"),
        (["--on", "v6e-3"], "expected one of v6e-1"),
        (["block_shuffle", "--on", "v6e-8"], "a step that trains, found block_shuffle"),
        (["--on", "8xh100", "--compile", "1"], "expected a TPU slice in --on"),
        (["--on", "v6e-8,v5e-8", "--compile", "1"], "need one name, found 2"),
        (["--batches", "8"], "--batches and --compile need --on"),
        (["--on", "v6e-8", "--batch", "8"], "no flag '--batch'"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, line):
    """In one line."""
    with pytest.raises((InputError, UsageError), match=line):
        plan(*arguments)
