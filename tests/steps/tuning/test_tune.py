"""`ponente tune`: what is searched, what is chosen, and the flags that it is written as."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InputError
from pipeline.cli import options
from pipeline.errors import UsageError
from pipeline.graph.declaration import load_experiment, nodes
from pipeline.graph.order import topological
from steps.cli import tune
from steps.platforms import chip_of
from steps.training.plan import memory
from steps.training.plan.declared_run import declared_run
from steps.tuning.search import (
    MODEL,
    NOTHING,
    ROUNDING,
    TRAINING,
    candidates,
    compile_fastest,
    front,
    search,
)

ROOT = Path(__file__).parents[3]
FILE = str(ROOT / "experiments" / "tomat_200m.py")


def train_node(*flags):
    """The node that trains of the experiment under some flags."""
    experiment = load_experiment(FILE)
    _, _, settings = options.parse("plan", list(flags), experiment, "tune")
    order = topological(nodes(experiment.build(settings)))
    return next(node for node in order if "optimizer" in node.config)


@pytest.fixture(scope="module")
def declared():
    """The run as it is declared."""
    return declared_run(train_node(), {})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(what is printed as JSON, the folder that was written) for one search."""
    out = tmp_path_factory.mktemp("tuned")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "say", lambda text, error=False: error or lines.append(text))
        assert tune.run([FILE, "--batches", "64", "--json", "--out", str(out)]) == 0
    return json.loads("\n".join(lines)), out


points = st.tuples(st.integers(1, 9), st.integers(1, 10**6))


@given(st.lists(points, max_size=12))
def test_no_plan_outside_the_front_is_better(values):
    """For each there is one in the front as fast, with at most 3 % more memory."""
    plans = [SimpleNamespace(seconds_per_token=s, bytes=b) for s, b in values]
    kept = front(plans)
    assert [p.seconds_per_token for p in kept] == sorted(p.seconds_per_token for p in kept)
    for slower, faster in zip(kept[1:], kept, strict=False):
        assert slower.bytes < 0.97 * faster.bytes
    for plan in plans:
        as_fast = [p for p in kept if p.seconds_per_token <= plan.seconds_per_token]
        assert min(p.bytes for p in as_fast) * 0.97 <= plan.bytes


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


def test_a_run_that_reduces_once_is_compared_with_those_that_cannot(declared):
    """`reduce` is "auto" in every candidate; sharding "fsdp" would refuse "step"."""
    parallel = replace(declared.train.parallel, sharding="zero1", reduce="step")
    given = replace(declared, train=replace(declared.train, parallel=parallel))
    usual, tried = (list(candidates(run, (64,))) for run in (declared, given))
    assert len(tried) == len(usual)
    assert {each.train.parallel.reduce for each in tried} == {"auto"}


@pytest.mark.slow
def test_commands_make_the_plans_and_keep_the_key_where_nothing_changes(found):
    """The printed command is parsed by the real parser: it declares what was predicted."""
    plain, _ = found
    keys = {}
    for changes, plan in plain["chosen"].items():
        program, verb, file, *flags = shlex.split(plan["command"])
        assert (program, verb, file) == ("ponente", "run", FILE)
        node = train_node(*flags)
        keys[changes] = node.key
        run = declared_run(node, {})
        fit = memory.fit(run.model, run.optimizer, run.train, run.hardware)
        assert int(fit.estimate.total) == plan["formula_bytes"]
        assert fit.train.remat != "auto"
    own = train_node().key
    assert keys["nothing"] == own
    assert own not in {key for changes, key in keys.items() if changes != "nothing"}


@pytest.mark.slow
def test_each_choice_is_faster_than_one_that_changes_less(found):
    """And fits; of the front it is the fastest. Heads of 256 are what pays on a v6e."""
    plain, _ = found
    speeds = [plan["tokens_per_second"] for plan in plain["chosen"].values()]
    assert speeds == sorted(speeds)
    assert all(p["formula_bytes"] <= p["limit_bytes"] for p in plain["chosen"].values())
    assert speeds[0] >= plain["declared"]["tokens_per_second"]
    assert "--model.head-size 256" in plain["chosen"]["model"]["command"]


@pytest.mark.slow
def test_the_page_and_the_arguments_are_written(found):
    """The page has the commands and a picture; the arguments are those of the first choice."""
    plain, out = found
    page = (out / "index.html").read_text()
    assert "<svg" in page
    text = re.sub(r"<[^>]*>", "", page)
    for plan in plain["chosen"].values():
        assert plan["command"] in text
    assert json.loads((out / "tune.json").read_text()) == plain
    assert shlex.split((out / "arguments.txt").read_text()) == plain["chosen"]["nothing"]["flags"]


@pytest.mark.slow
def test_the_screen_names_every_choice(capsys):
    """A table for each kind of change and the commands; flags given before are replaced."""
    assert tune.run([FILE, "--training.microbatches", "4", "--compile", "0"]) == 0
    shown = capsys.readouterr().out
    assert "as declared:" in shown
    assert "the same output:" in shown
    last = shown.strip().splitlines()[-1]
    assert last.count("--training.microbatches") == 1


@pytest.mark.slow
def test_the_next_is_asked_where_the_compiler_refuses(declared, monkeypatch):
    """And what it refused is not chosen."""
    asked = []

    def check(model, optimizer, train, slice_name, show):
        del optimizer, show
        asked.append((model, train))
        fits = train.microbatches >= 2
        return {"fits": fits, "peak_gib": 20.0 if fits else None, "need_gib": 40.0}

    monkeypatch.setattr("steps.tuning.search.check", check)
    chip = chip_of(declared.hardware)
    assert chip is not None
    tried = search(declared, chip, uncertain=True)
    after = compile_fastest(tried, declared, 6, lambda _: None)
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)
    chosen = after.chosen()
    assert chosen[ROUNDING].compiled == {"fits": True, "peak_gib": 20.0, "need_gib": 40.0}
    assert after.best(MODEL).candidate.train.microbatches >= 2
    assert all(train.steps for _, train in asked)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--compile", "0"], "expected an experiment's Python file"),
        ([str(ROOT / "experiments" / "tutorial_bytes.py")], "has no chip of a known kind"),
        ([FILE, "--step", "tokenize"], "--step: expected one of train"),
        ([FILE, "--hardware", "8xh100", "--compile", "1"], "needs a TPU slice"),
        ([FILE, "--batch", "8"], "no flag '--batch'"),
        ([FILE, "--force", "train"], "no flag --force"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, line):
    """In one line."""
    with pytest.raises((InputError, UsageError), match=line):
        tune.run(arguments)
