"""The dial: what one number gives, that it can be inverted, and that `plan` says the same."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.shape.config import TransformerConfig
from pipeline import InputError, pod
from pipeline.errors import UsageError
from pipeline.plan import facts as known
from pipeline.prices import price_of
from steps import recipe
from steps.cli import dial
from steps.dial import SHAPES, priced
from steps.training.plan.memory import fits, step_on
from tests.docs.pages import ROOT
from tests.steps.training.test_planning import facts
from training.recipes.curves import NANOCHAT
from training.recipes.nanochat import nanochat


def test_the_shapes_grow_and_have_all_depths():
    """Each has more parameters and multiplies each token by more than the one before."""
    models = [nanochat(depth, width=width).model for depth, width in SHAPES]
    for less, more in pairwise(models):
        assert less.parameter_count < more.parameter_count
        assert less.matmul_parameters < more.matmul_parameters
    assert {(depth, nanochat(depth).model.embed) for depth in range(1, 65)} <= {*SHAPES}


@pytest.mark.parametrize("depth", [1, 9, 12, 26])
def test_a_depth_is_nanochats(depth):
    found, own = recipe(depth=depth), nanochat(depth)
    assert (found.name, found.model, found.optimizer) == (own.name, own.model, own.optimizer)
    assert found.tokens == own.tokens
    assert recipe(parameters=own.model.parameter_count).model == own.model


@pytest.mark.slow
@settings(max_examples=15)
@given(parameters=st.floats(3e7, 1e10))
def test_parameters_are_met(parameters):
    """Within 1 % from 200 million on; smaller models are mostly tables, so shapes are further."""
    found = recipe(parameters=parameters, hardware="v6e-64")
    assert found.parameters == found.model.parameter_count
    assert found.parameters == pytest.approx(parameters, rel=0.01 if parameters > 2e8 else 0.14)
    assert 2 * found.model.embed <= found.model.mlp <= 8 * found.model.embed


@pytest.mark.slow
@settings(max_examples=15)
@given(tokens=st.floats(1e8, 5e10))
def test_tokens_are_met(tokens):
    """The most whole steps, with 8 to 18 tokens for each parameter in matmuls."""
    found = recipe(tokens=tokens, hardware="v6e-64")
    assert tokens - found.batch_tokens < found.tokens <= tokens
    assert 8 < found.tokens / found.model.matmul_parameters < 18


@pytest.mark.slow
@settings(max_examples=10)
@given(loss=st.floats(2.2, 3.5))
def test_a_loss_is_met(loss):
    """The forecast of the recipe is the loss that was asked for, as steps are whole."""
    found = recipe(loss=loss, hardware="v6e-64")
    assert found.loss == pytest.approx(loss, rel=1e-3)
    assert found.loss_range[0] < found.loss < found.loss_range[1]
    inside = NANOCHAT.runs[0][0] <= found.flops <= NANOCHAT.runs[-1][0]
    assert found.extrapolated != inside
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) / 4.65)


@pytest.mark.slow
@settings(max_examples=4)
@given(dollars=st.floats(4, 120), hardware=st.sampled_from(["v6e-1", "v6e-4", "v6e-8", "8xh100"]))
def test_dollars_are_spent(dollars, hardware):
    """Within 1 % below; one step more would cost more."""
    found = recipe(dollars=dollars, hardware=hardware)
    assert found.dollars <= dollars
    assert found.dollars == pytest.approx(dollars, rel=0.01)
    shape = {"width": found.model.embed, "steps": found.train.steps + 1}
    more = priced(nanochat(found.model.layers, **shape), pod(hardware))
    assert more.dollars > dollars


@pytest.mark.parametrize(
    ("asked", "hardware"),
    [({"dollars": 40.0}, "v6e-8"), ({"parameters": 130e6}, "v6e-4"), ({"depth": 26}, "8xh100")],
)
def test_plan_says_the_same(asked, hardware):
    """Hours and dollars of `plan` for an experiment with this recipe."""
    found = recipe(**asked, hardware=hardware)
    own = {"model": found.model, "optimizer": found.optimizer, "training": found.train}
    data = facts(**own, train_tokens=found.tokens, length=2048, hardware=hardware).data
    assert data["parameters"] == found.parameters
    assert data["tokens"] == found.tokens
    assert data["memory"]["fits"]
    rate = price_of(pod(hardware).generation).on_demand * pod(hardware).devices
    for end, hours, dollars in zip(
        ("fast", "slow"), found.hours_range, found.dollars_range, strict=True
    ):
        spent = data["run"][end]
        total = sum(spent[each] for each in ("steps", "start", "checkpoints", "evaluations"))
        assert total / 3600 == pytest.approx(hours, rel=1e-6)
        assert rate * total / 3600 == pytest.approx(dollars, rel=1e-6)
    assert found.hours_range[0] < found.hours < found.hours_range[1]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("parameters", (30e6, 100e6, 300e6, 1e9)),
        ("tokens", (1e8, 5e8, 2e9, 1e10)),
        ("dollars", (2, 8, 30, 120)),
        ("loss", (3.5, 3.1, 2.8, 2.5)),
    ],
)
def test_more_is_more(name, values):
    """A larger number, or a smaller loss, never gives less of anything."""
    found = [recipe(**{name: value}) for value in values]
    for less, more in pairwise(found):
        assert less.parameters < more.parameters
        assert less.tokens < more.tokens
        assert less.hours < more.hours
        assert less.dollars < more.dollars
        assert less.loss > more.loss
        assert less.batch_tokens <= more.batch_tokens


def test_microbatches_are_the_fewest_that_fit():
    found = recipe(depth=32, hardware="v6e-8")
    parts = found.train.microbatches
    assert parts > 1
    for count, fitting in ((parts, True), (parts // 2, False)):
        train = dataclasses.replace(found.train, microbatches=count)
        assert fits(step_on(pod("v6e-8"), found.model, found.optimizer, train)) is fitting


def test_small_batches_do_not_hide_recipes_of_many_chips():
    """No batch of the first depths divides over 256 chips; those of $900 do."""
    found = recipe(dollars=900, hardware="v6e-256")
    assert found.dollars == pytest.approx(900, rel=0.01)
    assert found.train.batch_size % 256 == 0


def test_a_price_of_ones_own_counts(tmp_path, monkeypatch):
    """Without one there are hours but no dollars, and none can be spent."""
    assert recipe(depth=8, hardware="v7x-8").dollars is None
    with pytest.raises(InputError, match="no public price of v7x; give one in a file that PONENTE"):
        recipe(dollars=10, hardware="v7x-8")
    prices = tmp_path / "prices.toml"
    prices.write_text('[v7x]\non_demand = 1.0\ndate = "2026-11-01"\nsource = "here"\n')
    monkeypatch.setenv("PONENTE_PRICES", str(prices))
    found = recipe(dollars=10, hardware="v7x-8")
    assert found.dollars == pytest.approx(4 * found.hours) == pytest.approx(10, rel=0.01)
    assert found.sources["dollars"] == "on demand, here, 2026-11-01"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "expected one of depth, parameters, tokens, dollars, loss; found none"),
        ({"depth": 3, "loss": 2.5}, "found depth and loss"),
        ({"tokens": -1.0}, "recipe: tokens: expected a number above 0, found -1.0"),
        ({"loss": math.nan}, "recipe: loss: expected a number above 0, found nan"),
        ({"dollars": math.inf}, "recipe: dollars: expected a number above 0, found inf"),
        ({"parameters": "130M"}, "recipe: parameters: expected a number above 0, found '130M'"),
        ({"depth": 2.5}, r"nanochat: depth: expected `?int`?, found 2\.5"),
        ({"depth": 12, "hardware": "v6e-3"}, "hardware: expected one of v6e-1, v6e-4"),
        ({"depth": 12, "hardware": "local"}, "chips whose time is predicted, .* found local"),
        ({"depth": 12, "hardware": "cpu-2x2"}, "chips whose time is predicted, .* found cpu-2x2"),
        ({"depth": 2, "hardware": "v6e-256"}, "sequences of nanochat d2 do not fit v6e-256"),
        ({"depth": 64, "hardware": "v6e-1"}, "sequences of nanochat d64 do not fit v6e-1"),
        ({"dollars": 1e6, "hardware": "v6e-1"}, r"asked for 1e\+06; no recipe that fits .* d66"),
        ({"dollars": 0.01}, r"asked for 0\.01; no .* nanochat d1 comes to 0\.8"),
        ({"dollars": 10, "hardware": "6xh100"}, "asked for 10; no recipe .* comes to 0$"),
        ({"tokens": 1e6}, r"asked for 1e\+06; no .* nanochat d1 comes to 5\.269e\+07"),
        ({"loss": 1.2}, r"asked for 1\.2; no .* nanochat d66 of width 4096 comes to 1\.8\d+$"),
        ({"parameters": 1e13}, r"asked for 1e\+13; no .* nanochat d66 of width 4096 comes to "),
    ],
)
def test_what_is_refused(asked, words):
    with pytest.raises(InputError, match=words):
        recipe(**asked)


def test_the_command_prints_one_object(capsys):
    """What Python returns, with configurations that can be read back."""
    flags = ["--parameters", "130e6", "--hardware", "v6e-4", "--json"]
    assert dial.run(flags) == 0
    printed, found = json.loads(capsys.readouterr().out), recipe(parameters=130e6, hardware="v6e-4")
    assert printed["format"] == 1
    assert printed["batch"] == found.batch_tokens
    assert printed["steps"] == found.train.steps
    for name in ("parameters", "tokens", "loss", "hours", "dollars", "bits_per_byte", "flops"):
        assert printed[name] == getattr(found, name)
    for name in ("hours_range", "dollars_range", "loss_range"):
        assert tuple(printed[name]) == getattr(found, name)
    assert (printed["name"], printed["hardware"]) == ("nanochat d8", "v6e-4")
    assert TransformerConfig.from_plain(printed["model"]) == found.model
    assert printed["optimizer"]["head"]["learning_rate"] == found.optimizer.head.learning_rate
    assert printed["sources"] == dict(found.sources)


def test_the_command_prints_a_table(capsys):
    """Every number has its line, with its source."""
    assert dial.run(["--loss", "2.6"]) == 0
    lines, found = capsys.readouterr().out.splitlines(), recipe(loss=2.6)
    text = {line.split()[0]: line for line in lines}
    assert text.keys() >= {*found.sources, "batch", "hardware"} - {"left out"}
    assert f"{found.tokens:,}" in text["tokens"]
    assert "2.6 " in text["loss"]
    assert "FineWeb-edu" in text["loss"]
    for name, source in found.sources.items():
        assert name == "left out" or text[name].endswith(source)
    assert "smear gate" in lines[-1]


def test_wrong_flags_are_usage_errors():
    for flags, words in ((["--depht", "3"], "--depht"), (["--depth", "x"], "invalid int value")):
        with pytest.raises(UsageError, match=words):
            dial.run(flags)


def test_ponente_has_the_verb(typed):
    """`ponente dial` reaches it, and a refusal is one line and status 1."""
    status, out, _ = typed("dial", "--depth", "4", "--json")
    assert (status, json.loads(out)["name"]) == (0, "nanochat d4")
    status, _, err = typed("dial")
    assert status == 1
    assert err.startswith("error: recipe: expected one of depth, parameters")


def test_the_page_trains_run_200m_by_the_dial(tmp_path, monkeypatch):
    """The block of docs/recipes.md plans the 200M experiment with a recipe of $50."""
    monkeypatch.setenv("PONENTE_PREFIX", str(tmp_path))
    page = (ROOT / "docs" / "recipes.md").read_text()
    block = next(b for b in page.split("```python\n")[1:] if "recipe(" in b).partition("```")[0]
    names = {}
    exec(block, names)
    train = next(each.node for each in names["planned"] if each.node.step.name == "train")
    data = known.state([train], {})[train.key].data
    assert data["parameters"] == names["found"].parameters
    assert data["tokens"] == names["found"].tokens
