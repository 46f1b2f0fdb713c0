"""What `plan` states of a step that trains, and what it refuses before anything is rented."""

import dataclasses
import json

import pytest

from experiments.run_200m import experiment
from models.flops import training_flops_per_token
from models.presets import llama_200m
from pipeline import pod
from pipeline.graph.node import topological
from pipeline.plan import facts as known
from pipeline.prices import price_of
from steps.planning import memory
from steps.planning.declared_run import declared_run
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.cost.memory_estimate import GIB

BIG = dataclasses.replace(llama_200m, layers=32, embed=4096, heads=32, kv_heads=8, mlp=14336)
FORCED = TrainConfig(
    batch_size=128, remat="matmuls", loss_chunks=1, parallel=Parallelism(sharding="zero1")
)


def node(**settings):
    """The train step of the 200M experiment."""
    order = topological(experiment.graph(None, **settings))
    return next(each for each in order if each.step.name == "train")


def facts(**settings):
    """Its facts while nothing is built."""
    train = node(**settings)
    return known.state([train], {})[train.key]


def test_what_the_200m_run_is():
    """Counts by hand: 4e9 tokens in batches of 128 x 4096; 12 bytes a parameter saved."""
    found = facts().data
    count = 203_452_416
    steps = 4_000_000_000 // 4096 // 128
    assert found["parameters"] == count
    assert found["parameters_without_embeddings"] == count - 32_768 * 1024
    assert found["tokens"] == steps * 128 * 4096
    assert found["checkpoint_bytes"] == 12 * count
    assert found["flops"] == pytest.approx(6 * found["tokens"] * count, rel=0.3)
    assert found["memory"]["fits"]
    fast, middle, slow = found["predicted"]["step_seconds"]
    assert fast < middle < slow
    assert sum(found["predicted"]["shares"].values()) == pytest.approx(1)
    flops = found["flops"] / steps / 16
    assert found["predicted"]["mfu_causal"] == pytest.approx(flops / middle / 918e12, rel=1e-3)


@pytest.mark.parametrize("schedule", ["batch", "length"])
def test_batch_phases_are_planned_one_by_one(schedule):
    """Tokens and FLOPs by hand; a mean step between those of the first and the last phase."""
    first, length = 2000, 4096
    shape = {
        "batch": dict(batch_size=32, batch_schedule=((first, 128),)),
        "length": dict(batch_size=128, length_schedule=((0, 8), (first, 1))),
    }[schedule]
    found = facts(training=TrainConfig(**shape)).data
    whole = facts(training=TrainConfig(batch_size=128)).data
    early, at_first = (32, length) if schedule == "batch" else (128, length // 8)
    late = (4_000_000_000 // length - first * early) // 128
    assert found["tokens"] == (first * early + late * 128) * length
    flops = [training_flops_per_token(llama_200m, at, causal=True) for at in (at_first, length)]
    assert found["flops"] == pytest.approx(
        (first * early * flops[0] + late * 128 * flops[1]) * length
    )
    assert found["predicted"] == whole["predicted"]
    assert found["memory"] == whole["memory"]
    # A mean step takes less than the last phase's, and more than its share of tokens.
    a_step, last = (each["run"]["slow"]["steps"] for each in (found, whole))
    a_step, last = a_step / (first + late), last / (4_000_000_000 // length // 128)
    tokens = (first * early + late * 128) / (first + late) / 128
    assert min(tokens, 0.8) < a_step / last < 0.99


def test_a_budget_of_less_than_a_batch_is_planned():
    """The step refuses it when it runs; the plan has no cost."""
    found = facts(train_tokens=1000).data
    assert found["tokens"] == 0
    assert "run" not in found


def test_a_checkpoint_with_muon_has_two_moments_of_tables():
    """12 bytes a parameter of tables and norms, 8 of the blocks' matrices."""
    found = facts(optimizer=OptimizerConfig(kind="muon")).data
    blocks = llama_200m.matmul_parameters - llama_200m.padded_vocab_size * llama_200m.embed
    assert found["checkpoint_bytes"] == 12 * found["parameters"] - 4 * blocks


def test_several_slices_are_planned_as_one_run():
    """The state is split within a slice; twice the chips take a little more than half the time."""
    one = facts(hardware="v6e-16").data
    two = facts(hardware="2xv6e-16", training=TrainConfig(batch_size=256)).data
    assert two["memory"]["need_bytes"] == one["memory"]["need_bytes"]
    rates = [each["predicted"]["tokens_per_second"][1] for each in (one, two)]
    assert 1.6 < rates[1] / rates[0] < 2


def test_the_cost_is_hours_times_chips_times_the_dated_price():
    """Of the slow end, on demand."""
    found = facts()
    slow = found.data["run"]["slow"]
    assert slow["steps"] == pytest.approx(7629 * found.data["predicted"]["step_seconds"][2])
    seconds = slow["steps"] + slow["start"] + slow["checkpoints"] + slow["evaluations"]
    price = price_of("v6e")
    dollars = f"${seconds / 3600 * 16 * price.on_demand:,.2f} on demand"
    (line,) = (line for line in found.lines if line.startswith("cost"))
    assert dollars in line
    assert price.date in line
    text = "\n".join(found.lines)
    assert "predicted" in text
    assert "docs/predictions.md" in text


def test_sequences_that_are_there_give_the_exact_number_of_steps():
    """Their number, not what sampling was asked for."""
    train = node()
    results = {train.inputs["sequences"].key: {"sequence_length": 4096, "sequences": 1000}}
    assert declared_run(train, results).steps == 1000 // 128
    assert declared_run(train, results).exact
    assert not declared_run(train, {}).exact


def test_what_cannot_fit_is_refused_with_three_that_do():
    """Each of the three, applied, is within the limit; all in one screen."""
    settings = {"model": BIG, "training": FORCED, "hardware": "v6e-16"}
    refusal = facts(**settings).refusal
    lines = refusal.splitlines()
    assert "does not fit v6e-16 by formula" in lines[0]
    assert "short by" in lines[0]
    assert len(lines) == 4
    run = declared_run(node(**settings), {})
    assert not memory.fit(run.model, run.optimizer, run.train, run.hardware).fits
    applied = 0
    for text, train, hardware in memory._changes(run):
        if any(line.strip().startswith(f"{text}:") for line in lines[1:]):
            found = memory.fit(run.model, run.optimizer, train, hardware)
            assert found.estimate.total <= found.limit == 31.25 * GIB
            applied += 1
    assert applied == 3


def test_a_run_stops_at_the_refusal(tmp_path, capsys):
    """Fault 36: before Ray starts, a slice is asked for or a step runs."""
    flags = ["--model.layers", "96", "--model.embed", "8192", "--training.remat", "none"]
    with pytest.raises(SystemExit) as stop:
        experiment.main(["run", "--prefix", str(tmp_path), *flags])
    said = capsys.readouterr()
    assert stop.value.code == 1
    assert "does not fit v6e-16 by formula" in said.err
    assert "Ray" not in said.out
    assert not [path for path in tmp_path.glob("sample-*") if (path / "manifest.json").exists()]


def test_a_model_larger_than_this_machine_is_refused():
    """Its state alone, on the CPUs of this machine; a small one is not."""
    wide = dataclasses.replace(llama_200m, layers=4000, embed=8192)
    found = facts(model=wide, hardware="cpu-2x2")
    assert "does not fit this machine" in found.refusal
    assert not facts(hardware="cpu-2x2").refusal


def test_a_gpu_and_a_chip_without_price_are_planned_too():
    """No compiler is asked for a GPU; the price is said to be unknown."""
    found = facts(hardware="8xa100")
    assert found.examine is None
    assert any("no dated price of a100" in line for line in found.lines)
    assert pod("8xa100").devices == 8


def test_facts_are_json():
    """As `plan --json` prints them."""
    assert json.loads(json.dumps(dict(facts().data)))["tokens"] == 3_999_793_152
