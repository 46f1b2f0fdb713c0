"""Presets of whole recipes beside the published formulas, counts and budgets."""

from __future__ import annotations

import dataclasses
import inspect
import math
import subprocess
import sys
from functools import reduce

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.nanopt_1b import nanopt_1b
from experiments.run_200m import run_200m
from models.shape.footprint import footprint
from models.transformer import Transformer
from pipeline import InputError
from training.optimizer import build
from training.recipes import Recipe, llama, marin_qwen3, nanochat, speedrun, tuned_muon
from training.recipes.nanochat import scaling_parameters

MARIN = ("130m", "300m", "520m", "1.2b")
PRESETS = [nanochat(12), speedrun(), *map(marin_qwen3, MARIN), llama("200m"), llama("1b")]


def counted(depth: int, vocab_size: int) -> dict[str, int]:
    """Parameters of nanochat's GPT, one `nn.Parameter` after the other."""
    width = math.ceil(depth * 64 / 128) * 128
    heads = width // 128
    rows = math.ceil(vocab_size / 64) * 64
    gated = [layer for layer in range(depth) if layer % 2 == (depth - 1) % 2]
    layer = 4 * width * width + 4 * width * width + 4 * width * width
    return {
        "wte": rows * width,
        "value_embeds": len(gated) * rows * width,
        "lm_head": rows * width,
        "transformer_matrices": depth * layer + len(gated) * 12 * heads,
        "scalars": 2 * depth,
    }


@given(depth=st.integers(1, 64), vocab_size=st.integers(300, 140_000))
def test_nanochat_follows_its_script(depth, vocab_size):
    """Horizon, batch, rates and decay as `base_train.py` computes them, at its defaults."""
    counts, reference = counted(depth, vocab_size), counted(12, vocab_size)
    size = counts["transformer_matrices"] + counts["lm_head"]
    tokens = int(12 * size)
    tokens_12 = 12 * (reference["transformer_matrices"] + reference["lm_head"])
    batch = 2 ** round(math.log2(2**19 * (tokens / tokens_12) ** 0.383))
    rate = (batch / 2**19) ** 0.5
    adam = (math.ceil(depth / 2) * 128 / 768) ** -0.5 * rate
    found = nanochat(depth, vocab_size=vocab_size)
    assert found.batch_tokens == batch
    assert found.train.steps == tokens // batch
    optimizer = found.optimizer
    groups = {
        "embedding": (0.3 * adam, 0.8, 0.995, 0.001),
        "value_embedding": (0.3 * adam * 0.5, 0.8, 0.995, 0.01),
        "head": (0.008 * adam, 0.8, 0.96, 0.01),
        "residual_scale": (0.5 * rate * 0.01, 0.8, 0.95, 0.05),
        "input_scale": (0.5 * rate, 0.96, 0.95, 0.0),
    }
    for role, expected in groups.items():
        group = optimizer.group(role)
        got = (group.learning_rate, group.beta1, group.beta2, group.weight_decay)
        assert got == pytest.approx(expected), role
        assert (group.kind, group.epsilon) == ("adamw", 1e-10)
    muon = optimizer.group("matrices")
    decay = 0.28 * math.sqrt(batch / 2**19) * (tokens_12 / tokens)
    assert (muon.kind, muon.learning_rate) == ("muon", pytest.approx(0.02 * rate))
    assert muon.weight_decay == pytest.approx(decay)
    assert found.model.parameter_count == sum(counts.values())
    assert found.model.matmul_parameters == size


def test_nanochat_has_the_published_counts():
    """Depth 12 of dev/LOG.md, without bigram tables, with gates of 12 inputs instead of 32."""
    model = nanochat(12).model
    published = {"wte": 25_165_824, "value_embeds": 150_994_944, "lm_head": 25_165_824}
    matrices, lambdas, gates = 84_935_808 - 6 * 32 * 6, 36 - 12, 6 * 12 * 6
    assert model.parameter_count == sum(published.values()) + matrices + lambdas + gates
    assert model.windows[:4] == (512, 512, 512, None)
    assert model.windows[-1] is None


@pytest.mark.parametrize(
    ("depths", "parameters", "batch"),
    [
        ((8, 8), (42e6, 42e6), 2**18),
        ((10, 16), (70e6, 235e6), 2**19),
        ((18, 26), (324e6, 918e6), 2**20),
        ((32, 50), (1.7e9, 6.2e9), 2**21),
    ],
)
def test_nanochat_has_the_published_batches(depths, parameters, batch):
    """The table of dev/LOG.md, 2026-02-05."""
    for depth, count in zip(depths, parameters, strict=True):
        found = nanochat(depth)
        assert found.model.matmul_parameters == pytest.approx(count, rel=0.02)
        assert found.batch_tokens == batch


def test_a_longer_run_keeps_batch_rates_and_decay():
    """D_ref has the same tokens per parameter as D, so neither depends on it."""
    usual, longer = nanochat(10), nanochat(10, steps=9999)
    assert longer.train == dataclasses.replace(usual.train, steps=9999)
    assert longer.optimizer == usual.optimizer


@pytest.mark.parametrize(("steps", "phases"), [(115, (40, 75)), (84, (29, 55)), (1, (0, 1))])
def test_short_runs_warm_up_before_they_decay(steps, phases):
    """40 steps where they fit beside a tail of 65 %."""
    assert nanochat(2, steps=steps).optimizer.phases(steps) == phases


def test_a_length_that_divides_no_power_of_two_has_one_of_sequences():
    """2^19 tokens are 174.8 sequences of 3,000: 128 of them, and rates for that batch."""
    found = nanochat(12, length=3000)
    assert (found.train.batch_size, found.model.window) == (128, 768)
    assert found.optimizer.learning_rate == pytest.approx(0.02 * (128 * 3000 / 2**19) ** 0.5)
    assert found.tokens == pytest.approx(nanochat(12).tokens, rel=1e-3)
    assert nanochat(1, length=2**20).train.batch_size == 1


def test_another_width_is_named_and_scales_adam():
    found = nanochat(10, width=768, mlp=2048)
    size = 10 * (4 * 768**2 + 2 * 768 * 2048) + 5 * 12 * 6 + 32_768 * 768
    assert found.name == "nanochat d10 of width 768"
    assert found.model.matmul_parameters == size == scaling_parameters(10, 768, 2048, 32_768)
    assert found.tokens == pytest.approx(12 * size, rel=1e-3)
    assert nanochat(9).name == "nanochat d9"
    assert nanochat(9).model.embed == 640


def test_speedrun_is_row_36():
    """Rates of the table; parameters of its script, but what the recipe says it leaves out."""
    found = speedrun()
    optimizer, model = found.optimizer, found.model
    rates = [("matrices", 0.025, 0.05), ("embedding", 0.7, 0.001)]
    rates += [("head", 0.004, 0.001), ("vectors", 0.015, 0.001)]
    for role, rate, decay in rates:
        group = optimizer.group(role)
        assert (group.learning_rate, group.weight_decay) == (rate, decay)
        assert group.kind == ("muon" if role == "matrices" else "adamw")
    assert found.tokens == 3250 * 8 * 64 * 1024
    assert model.score_scale == pytest.approx(0.12)
    block = 12 * 768**2 + (3 + 1 + 4 + 1) * 768 + 2 * 768
    script = 2 * 50_304 * 768 + 50_304 + 12 * block + 2 * 768
    head_bias, first_norm, query_and_key_norms = 50_304, 768, 12 * 2 * 128
    assert model.parameter_count == script - head_bias - first_norm + query_and_key_norms
    assert optimizer.phases(3250) == (0, 2275)


@pytest.mark.parametrize(
    ("size", "parameters", "tokens", "flops"),
    [
        ("130m", 154_147_328, 2_599_944_192, 1.777337e18),
        ("300m", 299_649_792, 5_999_951_872, 9.990359e18),
        ("520m", 602_457_088, 10_399_776_768, 4.210404e19),
        ("1.2b", 1_431_373_824, 23_999_807_488, 2.071634e20),
    ],
)
def test_marins_ladder_has_the_published_sizes(size, parameters, tokens, flops):
    """`speedrun_results.json` counts no norms of queries and keys."""
    found = marin_qwen3(size)
    norms = found.model.layers * 2 * found.model.head_size
    assert found.model.parameter_count == parameters + norms
    assert found.tokens == tokens
    assert found.flops == pytest.approx(flops, rel=0.01)


def test_llama_is_what_the_experiments_train():
    """Model and batch are the defaults of the two experiments, steps those of a plan."""
    for name, function in (("200m", run_200m), ("1b", nanopt_1b)):
        found, default = llama(name), inspect.signature(function).parameters
        assert found.model == default["model"].default
        assert found.train.batch_size == default["training"].default.batch_size
        rest = default["train_tokens"].default - found.tokens
        assert 0 <= rest < found.batch_tokens


def test_tuned_muon_is_that_of_the_speedrun_by_the_rules_of_nanochat():
    """Rates are those of the speedrun, times what nanochat's change by, relative to depth 12."""
    assert tuned_muon(768, 2**19) == speedrun().optimizer
    small, nano = nanochat(6, length=2048), nanochat(12)
    found = tuned_muon(small.model.embed, small.batch_tokens)
    for role in ("matrices", "embedding", "head"):
        rates = [
            each.group(role).learning_rate
            for each in (found, speedrun().optimizer, small.optimizer, nano.optimizer)
        ]
        assert rates[0] / rates[1] == pytest.approx(rates[2] / rates[3])
    assert dataclasses.replace(found.head, learning_rate=0.004) == speedrun().optimizer.head


def leaves(config: object, where: str) -> dict[str, bool]:
    """Whether each field of a configuration, by dotted name, has its default."""
    found = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{where}.{field.name}"
        if dataclasses.is_dataclass(value) and field.default != value and where == "optimizer":
            found |= leaves(value, name)
        else:
            found[name] = value == field.default
    return found


@pytest.mark.parametrize("recipe", PRESETS, ids=lambda recipe: recipe.name)
def test_every_number_has_a_source(recipe: Recipe):
    """Each source is of a field that exists, and each field that was chosen has one."""
    fields = {}
    for where in ("model", "optimizer", "train"):
        fields |= leaves(getattr(recipe, where), where)
    named = {name for name in recipe.sources if name != "left out"}
    assert named >= {name for name, default in fields.items() if not default}
    for name in named:
        reduce(getattr, name.split("."), recipe)
        assert recipe.sources[name]
    assert recipe.optimizer.phases(recipe.train.steps)[0] < recipe.train.steps


@pytest.mark.parametrize("recipe", [nanochat(3, vocab_size=512), speedrun(), marin_qwen3("520m")])
def test_a_model_and_its_optimizer_can_be_made(recipe: Recipe):
    """As many parameters as counted, each with a state of its role's kind."""
    made = jax.eval_shape(lambda key: Transformer.init(recipe.model, key=key), jax.random.key(0))
    optimizer = build(recipe.optimizer, steps=recipe.train.steps)
    state = jax.eval_shape(optimizer.init, made)
    parameters, moments = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (made, state)
    )
    assert parameters == recipe.model.parameter_count
    matrices = footprint(recipe.model).block_parameters
    assert moments == pytest.approx(2 * parameters - matrices, rel=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: marin_qwen3("1b"), "expected one of 130m, 300m, 520m, 1.2b, found '1b'"),
        (lambda: llama("7b"), "expected one of 200m, 1b, found '7b'"),
        (lambda: nanochat(0), "nanochat: depth: expected `?int`? >= 1, found 0"),
        (lambda: nanochat(4, vocab_size=0), "nanochat: vocab_size: expected .*found 0"),
        (lambda: nanochat(4, length=0), "nanochat: length: expected .*found 0"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.slow
def test_recipes_import_no_jax():
    """A driver without accelerators chooses a recipe."""
    code = "import sys, training.recipes; print({'jax', 'numpy', 'haliax'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
