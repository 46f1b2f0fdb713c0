"""Learnt factors and value embeddings on several devices."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.errors import InputError
from tests.training import tiny
from tests.training.step.test_train_step import MESHES, assert_same_on_a_mesh
from training.config import SPLIT_TABLES, Parallelism
from training.cost.memory_plan import check_model

MODEL = dataclasses.replace(
    tiny.FOUR_WAYS,
    layers=3,
    residual_scale=(1.15, 1.05),
    input_scale=(0.2, 0.05),
    value_embeddings="alternate",
    query_key_scale=1.2,
    embedding_norm=True,
    tied=False,
    head_std=0.1,
)
"""Two of three layers have tables."""
BOTH = Parallelism(sharding="fsdp", tensor=2, rules=SPLIT_TABLES)
NAMES = ("zero1-tensor2", "split-tables-sequence2", "split-tables-tensor2")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_computes_what_one_device_does(name):
    """Tables are split by ids, and by heads where devices share these."""
    devices, changes = {**MESHES, "split-tables-tensor2": (8, {"parallel": BOTH})}[name]
    assert_same_on_a_mesh(devices, changes, MODEL)


def test_ids_that_a_group_does_not_divide_are_refused():
    """The plan names the field; the embedding alone would be split along "embed"."""
    shape = dataclasses.replace(MODEL, vocab_size=65)
    check_model(dataclasses.replace(shape, value_embeddings="none"), tiny.split(8), 8)
    with pytest.raises(InputError, match=r"vocab 65 .*vocab_multiple to 8"):
        check_model(shape, tiny.split(8), 8)
    check_model(dataclasses.replace(shape, vocab_multiple=8), tiny.split(8), 8)
