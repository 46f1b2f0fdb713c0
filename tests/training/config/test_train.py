"""Configurations refuse what cannot be trained, and say which fields are part of the identity."""

import dataclasses
import json
import subprocess
import sys

import pytest

from models.shape import presets
from models.shape.config import YarnScaling
from models.shape.validation import from_plain
from pipeline.errors import InputError
from pipeline.identity.fingerprint import canonical, digest, identity_fields
from training.config import SPLIT_TABLES, Group, OptimizerConfig, Parallelism, TrainConfig
from training.config.optimizer import POLAR_STEPS, ROLES
from training.sharding.newton_schulz import POLAR_EXPRESS

TRAIN = {"steps": 10, "batch_size": 4, "sequence_length": 32}


def test_a_run_that_is_short_for_its_ema_is_warned_of():
    """The EMA's window is 1 / (1 - decay) steps; five times that is long enough."""
    for ema, steps, short in ((0.999, 60, True), (0.999, 5000, False), (0.0, 1, False)):
        said = TrainConfig(**{**TRAIN, "steps": steps, "ema": ema}).short_for_ema
        assert bool(said) == short
    assert "averages over 1,000 steps" in TrainConfig(**TRAIN, ema=0.999).short_for_ema


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "adam"),
        ("schedule", "exponential"),
        ("moment_dtype", "float16"),
        ("learning_rate", float("inf")),
        ("warmup", -0.1),
        ("decay", -1),
        ("min_ratio", 1.5),
        ("muon_learning_rate", -1.0),
        ("muon_momentum", 1.0),
        ("muon_rms", 0.0),
        ("lion_beta2", float("nan")),
        ("epsilon", 0.0),
        ("weight_decay", float("nan")),
        ("decay_shape", "cosine"),
        ("weight_decay_schedule", "wsd"),
        ("cautious_decay", "yes"),
        ("muon_iteration", "polar"),
        ("muon_row_beta", 1.0),
        ("muon_momentum_start", 0.85),
        ("muon_momentum_warmup", 400),
        ("muon_momentum_end", 0.9),
        ("head", {"learning_rate": 0.004}),
        ("head", Group(kind="muon")),
        ("vectors", Group(kind="muon")),
    ],
)
def test_optimizer_config_refuses(field, value):
    """A bad value is refused in one line that names the field."""
    with pytest.raises(InputError, match=field) as caught:
        OptimizerConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_muons_rate_needs_a_schedule_to_follow():
    """It is a multiple of learning_rate, so that cannot be zero."""
    with pytest.raises(InputError, match=r"muon_learning_rate.*learning_rate above 0"):
        OptimizerConfig(learning_rate=0.0, muon_learning_rate=0.02)
    muon = {"kind": "muon", "learning_rate": 0.004}
    assert OptimizerConfig(**{**muon, "learning_rate": 0.0}).rate_ratio("matrices") == 1.0
    assert OptimizerConfig(**muon, muon_learning_rate=0.02).rate_ratio("matrices") == 5.0
    assert OptimizerConfig(**muon, muon_learning_rate=0.02).rate_ratio("head") == 1.0
    assert OptimizerConfig(**muon).rate_ratio("matrices") == 1.0
    own = OptimizerConfig(**muon, muon_learning_rate=0.02, matrices=Group(learning_rate=0.04))
    assert own.rate_ratio("matrices") == 10.0
    with pytest.raises(InputError, match=r"head.learning_rate.*learning_rate above 0"):
        OptimizerConfig(learning_rate=0.0, head=Group(learning_rate=0.02))


@pytest.mark.parametrize(
    ("kind", "field"),
    [("adamw", "beta2"), ("muon", "muon_momentum"), ("muon", "beta1"), ("lion", "lion_beta2")],
)
def test_bfloat16_moments_that_would_never_fade_are_refused(kind, field):
    """A beta of 0.999 is for float32; one of a kind that is not used does not matter."""
    OptimizerConfig(kind=kind, **{field: 0.999})
    with pytest.raises(InputError, match=rf"{field}: bfloat16 .* expected at most 0\.996"):
        OptimizerConfig(kind=kind, moment_dtype="bfloat16", **{field: 0.999})
    other = "lion" if kind == "adamw" else "adamw"
    if field != "beta1":
        OptimizerConfig(kind=other, moment_dtype="bfloat16", **{field: 0.999})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"head": Group(beta2=0.999)}, "head.beta2"),
        ({"head": Group(kind="lion"), "lion_beta2": 0.999}, "lion_beta2"),
        ({"matrices": Group(kind="muon"), "muon_momentum": 0.999}, "muon_momentum"),
        ({"kind": "muon", "muon_row_beta": 0.999}, "muon_row_beta"),
    ],
)
def test_bfloat16_moments_of_groups_must_fade_too(fields, name):
    """A decay of one role's moments is refused by its own name, and allowed in float32."""
    OptimizerConfig(**fields)
    with pytest.raises(InputError, match=rf"OptimizerConfig.{name}: bfloat16"):
        OptimizerConfig(moment_dtype="bfloat16", **fields)


def test_polar_express_has_coefficients_for_five_iterations():
    """More are refused for it, and taken for Newton-Schulz."""
    assert len(POLAR_EXPRESS) == POLAR_STEPS
    OptimizerConfig(muon_steps=POLAR_STEPS + 1)
    OptimizerConfig(muon_steps=POLAR_STEPS, muon_iteration="polar_express")
    with pytest.raises(InputError, match=r"muon_steps: .* for 5 iterations, found 6"):
        OptimizerConfig(muon_steps=POLAR_STEPS + 1, muon_iteration="polar_express")


def test_a_role_has_its_own_settings_before_those_of_its_kind():
    """What a group leaves out is the configuration's, by the kind that the role has."""
    config = OptimizerConfig(
        kind="muon",
        learning_rate=1e-3,
        muon_learning_rate=2e-2,
        lion_beta1=0.8,
        head=Group(learning_rate=4e-3, beta1=0.7),
        vectors=Group(kind="lion", weight_decay=0.0),
        input_scale=Group(),
    )
    given = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
    assert config.group("head") == Group(
        **{**given, "kind": "adamw", "learning_rate": 4e-3, "beta1": 0.7}
    )
    lion = {"kind": "lion", "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.99}
    assert config.group("vectors") == Group(**{**given, **lion, "learning_rate": 1e-3})
    assert config.group("matrices") == Group(**given, kind="muon", learning_rate=2e-2)
    shared = {role: "adamw" for role in ROLES}
    own = {"head": "head", "vectors": "vectors"}
    assert config.labels == {**shared, "matrices": "muon", **own}
    assert set(OptimizerConfig(kind="lion").labels.values()) == {"lion"}


def test_the_average_of_the_last_steps_fits_the_run_and_is_the_only_one():
    """A fraction or a number of steps, no more than there are, without an EMA."""
    found = [TrainConfig(**TRAIN, average_last=part).averaged_steps for part in (0, 0.25, 0.3, 4)]
    assert found == [0, 2, 3, 4]
    for changes, words in (
        ({"average_last": 2.5}, "average_last: expected a fraction .* found 2.5"),
        ({"average_last": 11}, "average_last: 11 last steps are more than the 10 of the run"),
        ({"average_last": 2, "ema": 0.9}, "expected one average .* ema 0.9 and average_last 2"),
    ):
        with pytest.raises(InputError, match=words):
            TrainConfig(**{**TRAIN, **changes})
    assert TrainConfig(batch_size=4, average_last=150).averaged_steps == 150  # steps by a budget


RUNTIME = {
    *("checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_batches"),
    *("log_every", "max_skipped", "watchdog_seconds", "evaluate_batch_size"),
    *("remat", "attention", "parallel", "unroll", "loss_chunks", "compiler_options"),
    *("trackers", "profile"),
}


def test_runtime_fields_are_exactly_those_that_do_not_change_the_result():
    """The identity of a run has every field but the listed ones."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names - set(identity_fields(TrainConfig)) == RUNTIME
    assert set(identity_fields(OptimizerConfig)) == {
        field.name for field in dataclasses.fields(OptimizerConfig)
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel", Parallelism(tensor=2)),
        ("unroll", 2),
        ("remat", "none"),
        ("log_every", 7),
        ("seed", 1),
        ("z_loss", 1e-4),
    ],
)
def test_fingerprint_follows_the_identity(field, value):
    """Changing a field changes the fingerprint exactly when the field is identity."""
    old, new = TrainConfig(**TRAIN), TrainConfig(**{**TRAIN, field: value})
    same = digest(canonical(old)) == digest(canonical(new))
    assert same == (field in RUNTIME)


@pytest.mark.slow
def test_configuration_imports_no_jax():
    """Planning can import configurations, jobs and coordinators without JAX, NumPy or Arrow."""
    code = (
        "import sys, training.config.train, training.config.job, training.sharding.distributed\n"
        "print([m for m in ('jax', 'numpy', 'pyarrow', 'haliax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 2**31}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"microbatches": 3}, "microbatches"),
        ({"seed": -1}, "seed"),
        ({"compute_dtype": "float16"}, "compute_dtype"),
        ({"z_loss": float("nan")}, "z_loss"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"unroll": 0}, "unroll"),
        ({"attention": "flash"}, "attention"),
        ({"loss_chunks": "many"}, "loss_chunks"),
        ({"loss_chunks": 5}, "loss_chunks"),
        ({"batch_schedule": ((5, 16), (5, 8))}, "rising steps"),
        ({"batch_schedule": ((5, 0),)}, "expected int >= 1"),
        ({"batch_schedule": ((5, 9),), "microbatches": 2}, "9 is not divisible by microbatches"),
        ({"batch_schedule": ((0, 16),)}, "batch_size is the size from step 0 on"),
        ({"milestones": (5, 0)}, "milestones"),
        ({"remat": "nonsense"}, "remat: expected none, dots, "),
        ({"remat": "save:nonsense"}, "no intermediate is called 'nonsense'"),
        ({"checkpoint_every": 2.5}, "checkpoint_every: expected int, found 2.5"),
        ({"seed": True}, "seed: expected int or None, found True"),
        ({"z_loss": None}, "z_loss: expected float, found None"),
        ({"separate_documents": 1}, "separate_documents: expected bool, found 1"),
        ({"length_schedule": ((0, 3),)}, "cannot be cut into 3"),
        ({"length_schedule": ((0, 16),)}, "at least 2"),
        ({"ema": 1.0}, "ema"),
        ({"spike_guard": 0.9}, "skip every ordinary step"),
        (
            {"batch_schedule": ((0.5, 16),)},
            r"batch_schedule: expected int - at .*, found \(\(0.5, 16\),\)",
        ),
        ({"batch_schedule": (10, 16)}, r"batch_schedule: expected tuple"),
        ({"milestones": (10.5,)}, r"milestones: expected int"),
        ({"profile": (5,)}, r"profile: expected tuple of length 2, got 1, found \(5,\)"),
        ({"parallel": "fsdp"}, "parallel: expected Parallelism, found 'fsdp'"),
        ({"seed": 2**32}, "seed: expected int <= 4294967295, found 4294967296"),
        ({"parallel": Parallelism(sequence=3)}, "16 tokens do not divide over Parallelism"),
        (
            {"parallel": Parallelism(sequence=4), "length_schedule": ((0, 8),)},
            "2 tokens do not divide over Parallelism.sequence=4",
        ),
    ],
)
def test_train_config_refuses(fields, words):
    """A bad value is refused in one line that names the field."""
    with pytest.raises(InputError, match=words) as caught:
        TrainConfig(**{"steps": 10, "batch_size": 8, "sequence_length": 16, **fields})
    assert "\n" not in str(caught.value)


YARN = YarnScaling(factor=4.0, original_context=2048)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            steps=5,
            batch_size=8,
            sequence_length=16,
            parallel=Parallelism(tensor=2, group=4, rules=SPLIT_TABLES),
            batch_schedule=((2, 16),),
            length_schedule=((0, 4), (3, 1)),
        ),
        OptimizerConfig(kind="muon", head=Group(learning_rate=4e-3), vectors=Group(kind="lion")),
        presets.llama_3_2_1b,
        dataclasses.replace(presets.tiny, rope_scaling=YARN),
    ],
)
def test_configs_come_back_from_json(config):
    """Nested parts are rebuilt, equal to what was written; what an earlier version lacked is as by
    default."""
    read = json.loads(json.dumps(dataclasses.asdict(config)))
    assert from_plain(type(config), read) == config
    read.pop("matrices", None)
    assert from_plain(type(config), read) == config
