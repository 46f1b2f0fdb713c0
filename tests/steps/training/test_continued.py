"""What a plan takes from the declaration of the training that a step continues."""

import dataclasses

import pytest

from models.shape.presets import llama_200m
from pipeline import InputError, pod, select
from pipeline.graph.step import as_node
from pipeline.identity.fingerprint import plain_identity
from steps.exchange.export import export_hf
from steps.exchange.import_hf import import_hf
from steps.training.continue_training import extend
from steps.training.plan.declared_run import declared_run
from steps.training.train import train as train_step
from tests.steps.training.test_planning import node
from training.config import OptimizerConfig, TrainConfig


def test_a_selected_model_is_planned_as_the_winner_is():
    """Once that is known; before, only where all candidates have one shape."""
    sequences, optimizer = node().inputs["sequences"], OptimizerConfig()
    once = TrainConfig(steps=100, batch_size=128)
    shapes = [dataclasses.replace(llama_200m, layers=layers) for layers in (2, 4)]

    def best(*models):
        runs = (dataclasses.replace(once, seed=seed) for seed in range(len(models)))
        made = (train_step(sequences, m, optimizer, r) for m, r in zip(models, runs, strict=True))
        return select(tuple(made), by="last.loss")

    def longer(trained, **changes):
        more = {"train": dataclasses.replace(once, steps=200), "hardware": pod("v6e-16")}
        return as_node(extend(trained, sequences, optimizer=optimizer, **more, **changes))

    either = longer(best(*shapes))
    assert declared_run(either, {}) is None
    won = {"model": plain_identity(shapes[1]), "checkpoint": "checkpoint/00000100"}
    results = {either.inputs["checkpoint"].key: won}
    assert declared_run(either, results).model == shapes[1]
    assert declared_run(longer(best(shapes[1], shapes[1])), {}).model == shapes[1]
    wider = dataclasses.replace(shapes[1], rope_base=1e6)
    assert declared_run(longer(best(*shapes), model=wider), {}).model == wider
    odd = dataclasses.replace(llama_200m, residual_scale=(1.0, 0.0))
    with pytest.raises(InputError, match="no architecture of transformers"):
        export_hf(best(odd, odd))
    export_hf(best(odd, llama_200m))


def test_the_schedule_of_an_extended_import_is_continued():
    """Its first extension began at step 0; the decay of the second is what is left, 1,000 steps."""
    sequences, optimizer = node().inputs["sequences"], OptimizerConfig(schedule="wsd", decay=0.5)
    made = import_hf("hf://owner/name")
    for count in (9000, 10_000):
        training = {"train": TrainConfig(steps=count, batch_size=128), "optimizer": optimizer}
        made = extend(made, sequences, **training, model=llama_200m)
    assert declared_run(as_node(made), {}).optimizer.decay == 1000
