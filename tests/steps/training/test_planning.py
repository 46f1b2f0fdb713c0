"""What `plan` states of a step that trains, and what it refuses before anything is rented."""

import contextlib
import dataclasses
import json
import re

import pytest

import steps
from experiments.run_200m import experiment
from models.shape.footprint import training_flops_per_token
from models.shape.presets import llama_200m
from pipeline import InputError, pod
from pipeline.cli.options import override
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.identity.fingerprint import plain_identity
from pipeline.plan import facts as known
from pipeline.prices import price_of
from steps.exchange.import_hf import import_hf
from steps.training.continue_training import extend, warm_start
from steps.training.plan import memory
from steps.training.plan.declared_run import declared_run
from steps.training.train import train as train_step
from training.config import Group, OptimizerConfig, Parallelism, TrainConfig
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
    """Counts by hand: 4e9 tokens in batches of 128 x 4096; 12 bytes a parameter saved, 8 of Muon's.

    A layer's matrices: queries and output 1024 x 1024, keys and values 1024 x 512, MLP 3 of 3584.
    """
    found = json.loads(json.dumps(dict(facts().data)))  # as `plan --json` prints it
    count = 203_452_416
    steps = 4_000_000_000 // 4096 // 128
    assert found["parameters"] == count
    assert found["parameters_without_embeddings"] == count - 32_768 * 1024
    assert found["tokens"] == steps * 128 * 4096
    matrices = 12 * 1024 * (2 * 1024 + 2 * 512 + 3 * 3584)
    assert found["checkpoint_bytes"] == 12 * count - 4 * matrices
    theirs = found["forecast"]["published"]
    assert theirs["low"] < theirs["bits_per_byte"] < theirs["high"]
    assert "c4_en" in theirs["data"]
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


def test_a_budget_of_less_than_a_batch_is_refused():
    """As the step would, in its words, where the number of sequences is known; else it is planned
    without a cost."""
    train = node()
    sequences = {train.inputs["sequences"].key: {"sequence_length": 4096, "sequences": 100}}
    refusal = known.state([train], sequences)[train.key].refusal
    set_steps = node(training=TrainConfig(batch_size=128, steps=5))
    too_few = known.state([set_steps], sequences)[set_steps.key].refusal
    assert "128 sequences of 4096 tokens are more than the 100 sequences in the" in too_few
    assert refusal.startswith("train: a budget of 100 sequences of 4,096 tokens is less than one")
    found = facts(train_tokens=1000).data
    assert found["tokens"] == 0
    assert "run" not in found


@pytest.mark.parametrize(
    ("hardware", "changes", "words"),
    [
        ("8xh100", {"parallel": Parallelism(tensor=3)}, "8 devices are not divisible by"),
        ("8xh100", {"parallel": Parallelism(sequence=8, tensor=8)}, "by sequence 8 x tensor 8"),
        ("2xv6e-4", {"parallel": Parallelism(tensor=8)}, "each of 2 slices: Parallelism: 4 dev"),
        ("v6e-16", {"parallel": Parallelism(tensor=16)}, "kv_heads 4 is not divisible by the 16"),
        ("8xh100", {"attention": "splash"}, "splash cannot run, it needs platform tpu and this is"),
        ("v6e-16", {"attention": "cudnn"}, "cudnn cannot run, it needs platform gpu and this is"),
        ("8xh100", {"attention": "cudnn", "compute_dtype": "float32"}, "cudnn cannot run, it comp"),
        ("v6e-16", {"attention": "splash", "length_schedule": ((0, 64),)}, "64 positions are not"),
        ("v6e-16", {"microbatches": 16}, "a batch of 128 from step 0 on is not divisible by 16"),
        ("v6e-16", {"batch_schedule": ((9, 24),)}, "a batch of 24 from step 9 on is not divisible"),
        ("v6e-16", {"batch_size": 9}, "a batch of 9 from step 0 on is not divisible by 16"),
        ("v6e-16", {"parallel": Parallelism(sharding="fsdp", group=3)}, "a group of 3"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_the_words_of_the_trainer(hardware, changes, words):
    """Which builds its programs from the same function, see tests/random/plans.py."""
    training = TrainConfig(**{"batch_size": 128, "steps": 50, **changes})
    with pytest.raises(InputError, match=words):
        node(training=training, hardware=hardware)
    budget = dataclasses.replace(training, steps=0)
    first = not training.batch_schedule  # later phases count once the number of steps is known
    with pytest.raises(InputError, match=words) if first else contextlib.nullcontext():
        found = facts(training=budget, hardware=hardware)
        assert words in found.refusal


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ({"batch_size": 4, "length_schedule": ((0, 4),), "microbatches": 1}, 0),
        ({"batch_size": 4, "batch_schedule": ((50, 3),), "length_schedule": ((0, 4),)}, 1),
        ({"batch_size": 2, "length_schedule": ((0, 8),), "steps": 2, "milestones": (2,)}, 0),
        ({"batch_size": 4, "length_schedule": ((0, 8),), "microbatches": 2}, 0),
        ({"batch_size": 16, "evaluate_batch_size": 3, "profile": (50, 3)}, 0),
        ({"batch_size": 16, "average_last": 0.005}, 1),
        ({"batch_size": 16, "milestones": (9, 90), "batch_schedule": ((90, 3),)}, 2),
        ({"batch_size": 16, "length_schedule": ((90, 2048),), "profile": (51, 1)}, 2),
    ],
)
def test_batches_that_no_step_has_are_not_refused(changes, late):
    """Uncut ones of rows that are cut from the start, those of evaluations, those after the end.

    Settings that begin after the end are told.
    """
    found = facts(training=TrainConfig(**{"steps": 50, **changes}), hardware="v6e-16")
    assert not found.refusal
    told = [line for line in found.lines if line.startswith("warning")]
    assert len(told) == late


def test_what_is_left_of_a_run_is_planned():
    """1,000 of 8,629 steps in time, checkpoints and evaluations; the size is that of the whole."""
    whole = node()
    steps = declared_run(whole, {}).steps
    sequences = whole.inputs["sequences"]
    plain = {name: whole.config[name] for name in ("model", "optimizer")}
    once = TrainConfig(steps=steps, batch_size=128, evaluate_every=1000, checkpoint_every=1000)
    more = dataclasses.replace(once, steps=steps + 1000)

    def facts_of(made):
        made = as_node(made)
        return known.state([made], {})[made.key]

    on = {"hardware": pod("v6e-16")}
    first = train_step(sequences, plain["model"], plain["optimizer"], once, **on)
    longer = extend(first, sequences, optimizer=plain["optimizer"], train=more, **on)
    one, two = facts_of(first), facts_of(longer)
    assert two.data["steps_done"] == steps
    assert two.data["tokens"] == 1000 * 128 * 4096
    slow = {name: each.data["run"]["slow"] for name, each in (("one", one), ("two", two))}
    assert slow["two"]["steps"] == pytest.approx(slow["one"]["steps"] * 1000 / steps)
    saves = (steps + 1000) // 1000 - steps // 1000 + 1
    each = slow["one"]["checkpoints"] / (steps // 1000 + 1)
    assert slow["two"]["checkpoints"] == pytest.approx(saves * each)
    (line,) = (line for line in two.lines if line.startswith("training"))
    assert f"{steps + 1000:,} steps" in line
    assert "1,000 steps, 524,288,000 tokens are left" in line


def test_several_slices_are_planned_as_one_run():
    """The state is split within a slice; twice the chips take a little more than half the time."""
    one = facts(hardware="v6e-16").data
    two = facts(hardware="2xv6e-16", training=TrainConfig(batch_size=256)).data
    assert two["memory"]["need_bytes"] == one["memory"]["need_bytes"]
    rates = [each["predicted"]["tokens_per_second"][1] for each in (one, two)]
    assert 1.6 < rates[1] / rates[0] < 2


def test_a_model_to_import_is_planned_by_its_folder(tmp_path):
    """Size, memory, speed and cost as of a run that declares that shape; of the hub, why not."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    content = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000}
    content |= {"max_position_embeddings": 4096, "tie_word_embeddings": True, **shape, **heads}
    (tmp_path / "config.json").write_text(json.dumps(content))
    sequences = node().inputs["sequences"]
    more = {"optimizer": OptimizerConfig(), "hardware": pod("v6e-8")}
    training = TrainConfig(steps=100, batch_size=64)

    def of(source, **changes):
        made = as_node(import_hf(source))
        train = dataclasses.replace(training, **changes)
        tuned = as_node(warm_start(made, sequences, take="model", train=train, **more))
        return made, tuned, known.state([made, tuned], {})

    made, tuned, found = of(str(tmp_path))
    count = 1000 * 1024 + 12 * (1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072 + 2 * 1024 + 256)
    count += 1024
    assert found[made.key].lines == (f"model       Qwen3ForCausalLM, {count:,} parameters",)
    assert found[tuned.key].data["parameters"] == count
    assert found[tuned.key].data["memory"]["fits"]
    heads = [line.split()[0] for line in found[tuned.key].lines if line[0] != " "]
    assert {"model", "training", "memory", "predicted", "run", "cost"} <= {*heads}
    _, tuned, found = of(str(tmp_path), batch_size=9)
    assert "a batch of 9 from step 0 on is not divisible by 8" in found[tuned.key].refusal
    (tmp_path / "config.json").write_text('{"architectures": ["Another"]}')
    made, tuned, found = of(str(tmp_path))
    assert "architecture Another cannot be computed" in found[made.key].refusal
    for source in (str(tmp_path), "hf://owner/name"):
        _, tuned, found = of(source)
        (line,) = found[tuned.key].lines
        assert line.endswith("are known when import_hf is built")
        # Built, its result has the shape.
        child = tuned.inputs["checkpoint"]
        model = plain_identity(dataclasses.replace(llama_200m, layers=2))
        results = {child.key: {"model": model, "checkpoint": "checkpoint/00000000"}}
        assert known.state([tuned], results)[tuned.key].data["memory"]["fits"]


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


def test_data_that_is_repeated_is_counted_and_warned_of():
    """100 rows for ten steps of 64 are read 6.4 times; two sources by their weights."""
    train = node(training=TrainConfig(batch_size=64, steps=10))
    for rows, times in ((100, "6.40"), (1600, "0.40")):
        results = {train.inputs["sequences"].key: {"sequence_length": 4096, "sequences": rows}}
        text = "\n".join(known.state([train], results)[train.key].lines)
        assert f"data        read {times} times" in text
        assert ("is read 6.4 times" in text) == (rows == 100)
    cache = train.inputs["sequences"]
    mixed = steps.mix(
        (cache, steps.block_shuffle(cache.inputs["tokens"], 4096, seed=5)), weights=(1.0, 3.0)
    )
    few = {each.key: {"sequences": 10} for each in mixed.inputs.values()}
    again = steps.train(mixed, *(train.config[n] for n in ("model", "optimizer", "train")))
    found = declared_run(again, few).epochs
    assert found == pytest.approx((16.0, 48.0), abs=0.6)


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_three_that_do():
    """Each of the three, applied, is within the limit; all in one screen."""
    settings = {"model": BIG, "training": FORCED, "hardware": "v6e-16"}
    refusal = facts(**settings).refusal
    lines = refusal.splitlines()
    assert "does not fit v6e-16 by formula" in lines[0]
    assert "short by" in lines[0]
    assert len(lines) == 4
    run = declared_run(node(**settings), {})
    assert not memory.fits(memory.step_on(run.hardware, run.model, run.optimizer, run.train))
    applied = 0
    for text, changes, hardware in memory._changes(run):
        if any(line.strip().startswith(f"{text}:") for line in lines[1:]):
            train = dataclasses.replace(run.train, **changes)
            found = memory.step_on(hardware, run.model, run.optimizer, train)
            assert found.estimate.total <= memory.limit_of(found) == 31.25 * GIB
            applied += 1
    assert applied == 3


@pytest.mark.slow
def test_a_model_larger_than_this_machine_is_refused():
    """Its state alone, on the CPUs of this machine; a small one is not."""
    wide = dataclasses.replace(llama_200m, layers=4000, embed=8192)
    found = facts(model=wide, hardware="cpu-2x2")
    assert "does not fit this machine" in found.refusal
    found = facts(hardware="cpu-2x2")
    assert not found.refusal
    (line,) = (line for line in found.lines if line.startswith("memory"))
    small = facts(hardware="cpu-2x2", training=TrainConfig(batch_size=4, microbatches=1))
    (fits,) = (line for line in small.lines if line.startswith("memory"))
    # 128 rows of 4,096 tokens keep the matmuls of 12 layers; the state is that of 4 rows.
    parts = [re.findall(r"([\d.]+) GiB|about ([\d.]+)", each) for each in (line, fits)]
    assert parts[0][0] == parts[1][0]
    assert float(parts[0][1][1]) > 20 * float(parts[1][1][1])
    assert "which may be too little" in line
    assert "which may be too little" not in fits


def test_a_gpu_and_a_chip_without_price_are_planned_too():
    """No compiler is asked for a GPU; v7x, which has no price, is paid for by the chip."""
    found = facts(hardware="8xa100")
    assert found.examine is None
    found = facts(hardware="v7x-16")
    assert any("no public price of v7x" in line for line in found.lines)
    assert any("h of 8 v7x" in line for line in found.lines)


def test_hosts_with_few_gpus_are_slower_than_one_with_all():
    """The same eight GPUs over the network; a host of eight is the usual one."""
    one, two, eight = (
        facts(training=FORCED, hardware=name).data["predicted"]
        for name in ("8xh100", "2x4xh100", "8x1xh100")
    )
    seconds = [each["step_seconds"][1] for each in (one, two, eight)]
    assert seconds == sorted({*seconds})


def test_a_checkpoint_with_muon_has_two_moments_of_tables():
    """12 bytes a parameter of tables and norms, 8 of the blocks' matrices."""
    found = facts(optimizer=OptimizerConfig(kind="muon")).data
    blocks = llama_200m.matmul_parameters - llama_200m.padded_vocab_size * llama_200m.embed
    assert found["checkpoint_bytes"] == 12 * found["parameters"] - 4 * blocks


def test_an_average_of_the_last_steps_is_saved_as_an_ema_is():
    """4 bytes a parameter more, in a checkpoint, on the chips and on a host."""
    plain, *others = (
        facts(training=dataclasses.replace(FORCED, **changes)).data
        for changes in ({}, {"ema": 0.99}, {"average_last": 150})
    )
    for found in others:
        assert found["checkpoint_bytes"] == plain["checkpoint_bytes"] + 4 * plain["parameters"]
        assert found["memory"]["need_bytes"] > plain["memory"]["need_bytes"]
    without, own = (
        memory.host_need(declared_run(node(training=training, hardware="cpu-1x1"), {}))
        for training in (FORCED, dataclasses.replace(FORCED, ema=0.99))
    )
    assert own == without + 4 * plain["parameters"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of an experiment that trains."""

    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainConfig = FORCED


@pytest.mark.slow
def test_groups_are_dotted_flags():
    """A role's rate and kind, the schedules and the average of a command line are the step's."""
    flags = ["--optimizer.head.learning_rate", "0.004", "--optimizer.matrices.kind", "muon"]
    flags += ["--optimizer.muon-row-beta", "0.9", "--training.average-last", "0.25"]
    flags += ["--optimizer.embedding.weight-decay", "0.0", "--optimizer.cautious-decay", "True"]
    found = override(Settings(), flags, "run_200m")
    assert found.optimizer == OptimizerConfig(
        head=Group(learning_rate=0.004),
        matrices=Group(kind="muon"),
        embedding=Group(weight_decay=0.0),
        muon_row_beta=0.9,
        cautious_decay=True,
    )
    assert found.training == dataclasses.replace(FORCED, average_last=0.25)


def test_sequences_that_are_there_give_the_exact_number_of_steps():
    """Their number, not what sampling was asked for."""
    train = node()
    results = {train.inputs["sequences"].key: {"sequence_length": 4096, "sequences": 1000}}
    assert declared_run(train, results).steps == 1000 // 128
    assert declared_run(train, results).exact
    assert not declared_run(train, {}).exact
