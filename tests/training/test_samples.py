"""Samples while training: the same text on every mesh, from one program."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from models.generate import generate
from models.sampling import Sampling
from models.transformer import Transformer
from pipeline.errors import InputError
from tests.training import tiny
from training.mesh import make_layout
from training.parallelism import Parallelism
from training.samples import Sampler

PROMPTS = ([3, 1, 4], [7], [5] * 9)
HOT = Sampling(temperature=3.0, top_k=40, top_p=0.9, seed=5)


def parameters(seed: int) -> Transformer:
    """Not as they start, where every prediction is alike: ten times as large."""
    model = jax.jit(lambda key: Transformer.init(tiny.MODEL, key=key))(jax.random.key(seed))
    return jax.tree.map(lambda leaf: leaf * 10, model)


def placed(model: Transformer, layout) -> Transformer:
    return jax.device_put(model, layout.shardings(model))


@pytest.mark.parametrize(
    "parallel",
    [
        Parallelism(sharding="fsdp", group=2, tensor=2),
        Parallelism(sharding="replicated", sequence=2),
    ],
    ids=["fsdp_and_tensor", "sequence"],
)
def test_every_mesh_writes_what_one_device_writes(parallel):
    """Drawn, some rows ended before others, while the parameters change; compiled once."""
    layout = make_layout(jax.devices()[:4], parallel)
    options = {"new_tokens": 7, "sampling": HOT, "eos_id": 11}
    sampler = Sampler(tiny.MODEL, layout, PROMPTS, compute_dtype="float32", **options)
    for seed in (0, 1):
        model = parameters(seed)
        assert sampler(placed(model, layout)) == generate(model, PROMPTS, **options)
    assert sampler.compilations == 1


def test_one_new_token():
    """The one that the prompts' own pass gives."""
    layout = make_layout(jax.devices()[:1])
    model = parameters(0)
    sampler = Sampler(tiny.MODEL, layout, PROMPTS, new_tokens=1, compute_dtype="float32")
    assert sampler(placed(model, layout)) == generate(model, PROMPTS, new_tokens=1)


def test_what_cannot_be_continued_is_refused_before_training():
    """Not at the first samples."""
    learned = dataclasses.replace(tiny.MODEL, positions="learned", context=16)
    layout = make_layout(jax.devices()[:1])
    with pytest.raises(InputError, match="16 learned positions"):
        Sampler(learned, layout, [[1] * 10], new_tokens=7, compute_dtype="float32")
