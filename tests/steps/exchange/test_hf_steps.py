"""What is refused, and said, where a graph with exports and imports is declared or planned."""

from __future__ import annotations

import dataclasses

import pytest

from models.shape import presets
from pipeline import InputError
from pipeline.errors import StepFailed
from pipeline.graph.step import as_node
from steps import (
    block_shuffle,
    export_hf,
    extend,
    import_hf,
    sample,
    tokenize,
    train,
    train_tokenizer,
)
from steps.training.plan.facts import training_facts
from tests.pipeline.helpers import bring_up
from tests.steps.exchange.hf_folders import NEEDS_ORACLE, folder
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.config import OptimizerConfig

SEQUENCES = block_shuffle(synthetic(), sequence_length=tiny.LENGTH)


def trained(model=tiny.MODEL):
    return train(SEQUENCES, model=model, optimizer=OptimizerConfig(), train=tiny.TRAIN)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: export_hf(trained(dataclasses.replace(tiny.MODEL, attention_soft_cap=9.0))),
            "no architecture of transformers .* attention_soft_cap=9.0; change these fields",
        ),
        (lambda: export_hf(trained(), dtype="int8"), "expected bfloat16 or float32, found 'int8'"),
        (lambda: export_hf(trained(), parameters="mean"), "expected ema or last"),
        (lambda: export_hf(trained(), shard_bytes=0), "shard_bytes"),
        (lambda: import_hf("gs://bucket/model"), "expected a folder or hf://"),
        (lambda: import_hf("/model", sequence_length=1), "sequence_length"),
        (lambda: import_hf("/model", compute_dtype="int8"), "compute_dtype"),
    ],
)
def test_refused_where_it_is_declared(call, line):
    """Before a token is trained."""
    with pytest.raises(InputError, match=line):
        call()


def test_plan_names_the_architecture():
    """Or the field that prevents one; it changes no key."""
    facts = training_facts(as_node(trained()), {})
    assert facts.data["export"] == "exports to Hugging Face as Qwen3ForCausalLM"
    assert any(facts.data["export"] in line for line in facts.lines)
    line = training_facts(as_node(trained(presets.nanochat_d16)), {}).data["export"]
    assert "does not export to Hugging Face" in line
    assert "embedding_norm=False" in line


def test_a_qwen2_model_of_our_own_tokenizer_is_refused_where_it_is_declared():
    """AutoTokenizer would replace the tokenizer; the graph says so before anything trains."""
    qwen2 = dataclasses.replace(tiny.MODEL, qkv_biases=True, qk_norm=False, vocab_size=512)
    documents = sample("python-docs://", tokens=1000, splits=(("validation", 100),))
    tokens = tokenize(documents, train_tokenizer(documents, vocab_size=512))
    sequences = block_shuffle(tokens, sequence_length=tiny.LENGTH)
    node = train(sequences, model=qwen2, optimizer=OptimizerConfig(), train=tiny.TRAIN)
    with pytest.raises(InputError, match=r"not that of train_tokenizer; .* auto_tokenizer=False"):
        export_hf(node)
    export_hf(node, auto_tokenizer=False)


@NEEDS_ORACLE
@pytest.mark.slow
def test_an_import_cannot_be_trained_on_tokens_of_another_tokenizer(tmp_path):
    """Refused before anything trains."""
    imported = import_hf(str(folder("qwen3")))
    longer = extend(imported, SEQUENCES, optimizer=tiny.OPTIMIZER, train=tiny.TRAIN)
    with pytest.raises(StepFailed, match="that of the tokens t; tokenize the documents"):
        bring_up(str(tmp_path / "store"), longer)
