"""Configurations refuse what cannot be trained, and say which fields are part of the identity."""

import dataclasses
import subprocess
import sys

import pytest

from pipeline.errors import InputError
from pipeline.fingerprint import canonical, digest, identity_fields
from training.config import OptimizerConfig, TrainConfig

TRAIN = {"steps": 10, "batch_size": 4, "sequence_length": 32}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("sequence_length", 1),
        ("microbatches", 0),
        ("microbatches", 3),
        ("seed", -1),
        ("compute_dtype", "float16"),
        ("z_loss", -1.0),
        ("z_loss", float("nan")),
        ("evaluate_every", 0),
        ("keep_checkpoints", 0),
        ("fsdp", 0),
        ("attention", "flash"),
        ("loss_chunks", 0),
        ("loss_chunks", "many"),
        ("loss_chunks", 5),
    ],
)
def test_train_config_refuses(field, value):
    """A bad value is refused in one line that names the field."""
    with pytest.raises(InputError, match=field) as caught:
        TrainConfig(**{**TRAIN, field: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "linear"),
        ("learning_rate", -1.0),
        ("learning_rate", float("inf")),
        ("warmup", -0.1),
        ("decay", -1),
        ("min_ratio", 1.5),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("clip_norm", 0.0),
        ("weight_decay", float("nan")),
    ],
)
def test_optimizer_config_refuses(field, value):
    """A bad value is refused in one line that names the field."""
    with pytest.raises(InputError, match=field) as caught:
        OptimizerConfig(**{field: value})
    assert "\n" not in str(caught.value)


RUNTIME = {
    *("checkpoint_every", "keep_checkpoints", "log_every", "max_skipped"),
    *("remat", "attention", "fsdp", "loss_chunks"),
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
    [("fsdp", 4), ("remat", "none"), ("log_every", 7), ("seed", 1), ("z_loss", 1e-4)],
)
def test_fingerprint_follows_the_identity(field, value):
    """Changing a field changes the fingerprint exactly when the field is identity."""
    old, new = TrainConfig(**TRAIN), TrainConfig(**{**TRAIN, field: value})
    same = digest(canonical(old)) == digest(canonical(new))
    assert same == (field in RUNTIME)


def test_configuration_imports_no_jax():
    """Planning can import configurations, jobs and coordinators without JAX, NumPy or Arrow."""
    code = (
        "import sys, training.config, training.job, training.distributed\n"
        "print([m for m in ('jax', 'numpy', 'pyarrow', 'haliax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
