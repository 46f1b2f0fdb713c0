"""A model of `transformers` here and back: imported, evaluated, trained on, exported."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import steps
from data.cache.token_array import TokenArray
from models.generate.generate import generate
from models.hf.architectures import to_json
from pipeline.store import storage
from steps.exchange.card import write_cards
from steps.exchange.hf.tokenizer_files import write_tokenizer_files
from tests.models.test_transformers import theirs as logits_of
from tests.pipeline.helpers import bring_up
from tests.steps.built import built
from tests.steps.exchange.hf_folders import NEEDS_ORACLE
from tests.steps.mini import MINI
from tests.training.tiny import learned
from training.config import OptimizerConfig

pytestmark = [pytest.mark.slow, NEEDS_ORACLE]

LENGTH, STEPS, NEW = MINI.length, 50, 12
SHAPE = dataclasses.replace(MINI.model, embed=40, heads=4, kv_heads=2, head_size=12, qk_norm=False)


@pytest.fixture(scope="module")
def store(trained):
    """The store of the model that several files ask: its tokens are there."""
    return trained.rpartition("/")[0]


def tokens_of(store):
    """The nodes of the small main job up to its shuffled sequences."""
    splits = (("validation", MINI.validation_tokens),)
    documents = steps.sample(MINI.source, tokens=MINI.train_tokens, splits=splits, seed=MINI.seed)
    tokenizer = steps.train_tokenizer(
        documents, vocab_size=MINI.model.vocab_size, tokens=MINI.tokenizer_tokens
    )
    tokens = steps.tokenize(documents, tokenizer)
    return tokens, steps.block_shuffle(tokens, LENGTH, seed=MINI.seed)


@pytest.fixture(scope="module")
def theirs(store, trained, tmp_path_factory):
    """A Llama model with random weights in a folder as `transformers` saves it, and the model."""
    from tests.models import transformers_weights as weights

    model = weights.random_model(SHAPE, LENGTH)
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    write_tokenizer_files(steps.load(trained).tokenizer, str(folder), SHAPE.vocab_size, LENGTH)
    return folder, model


def loaded(folder, **more):
    """What `transformers` makes of a folder, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def tensors_in(folder):
    """Every tensor of a folder's safetensors."""
    from safetensors.numpy import load_file

    found = {}
    for name in storage.list_names(str(folder)):
        if name.endswith(".safetensors"):
            found |= load_file(f"{folder}/{name}")
    return found


def test_there_and_back_has_the_same_bits(store, theirs):
    """Import, then export in float32: every tensor as it was; and the same logits in between."""
    folder, model = theirs
    imported = steps.import_hf(str(folder), sequence_length=LENGTH)
    out = built(
        store,
        steps.export_hf(imported, dtype="float32", shard_bytes=50_000),
        steps.HuggingFaceModel,
    )
    want, found = tensors_in(folder), tensors_in(out.folder)
    assert len(out.result["files"]) > 2
    assert found.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    again, _ = loaded(out.folder, attn_implementation="eager")
    rows = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (2, 40))
    np.testing.assert_array_equal(logits_of(again, rows), logits_of(model, rows))
    ours = steps.load(built(store, imported, steps.Checkpoint))
    gap = np.abs(np.stack([ours(row) for row in rows]) - logits_of(model, rows)).max()
    assert gap < 1e-4 * np.abs(logits_of(model, rows)).max()


def test_an_imported_model_is_evaluated_and_trained_on(store, theirs):
    """Its loss is torch's; 50 steps lower it; what is exported then writes as ours does."""
    import torch

    folder, model = theirs
    tokens, sequences = tokens_of(store)
    imported = steps.import_hf(str(folder), sequence_length=LENGTH, compute_dtype="float32")
    scores = built(store, steps.evaluate(imported, tokens), steps.Scores).result
    cache = built(store, tokens, steps.TokenCache)
    array = TokenArray(cache.split("validation"), cache.result["vocab_size"])
    count = int(array.shard_ends[-1])
    ids = torch.tensor(array.read(np.array([0]), count)[0].astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for row in ids.split(LENGTH):
            total += model(row[None], labels=row[None]).loss.item() * (len(row) - 1)
    want = total / (count - -(-count // LENGTH))
    assert scores["loss"] == pytest.approx(want, rel=1e-5)

    train = dataclasses.replace(MINI.training, steps=STEPS, evaluate_every=STEPS)
    optimizer = OptimizerConfig(learning_rate=3e-3)
    warm = steps.warm_start(imported, sequences, take="model", optimizer=optimizer, train=train)
    trained = built(store, warm, steps.Checkpoint)
    assert trained.result["last"]["loss"] < trained.result["first"]["loss"] - 1
    assert trained.result["first"]["loss"] == pytest.approx(scores["loss"], rel=0.02)

    events = []
    longer = steps.extend(imported, sequences, optimizer=optimizer, train=train)
    bring_up(store, longer, events=events)
    extended = built(store, longer, steps.Checkpoint)
    assert learned(extended.rows("history")) == learned(trained.rows("history"))
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert "imported without moments" in warning

    out = built(
        store, steps.export_hf(warm, license="mit", dtype="float32"), steps.HuggingFaceModel
    )
    again, tokenizer = loaded(out.folder)
    ours = steps.load(trained)
    text = "Return the name of"
    prompt = ours.encode(text)
    assert [tokenizer.bos_token_id, *tokenizer(text).input_ids] == prompt
    (written,) = generate(ours.network, [prompt], new_tokens=NEW)
    given = torch.tensor([prompt])
    found = again.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )
    assert written == found[0, len(prompt) :].tolist()
    check_cards(out, trained)
    write_cards(f"{store}/at", trained, out.result, "mine", "", (), at=STEPS - 1)
    card = storage.read_bytes(f"{store}/at/README.md").decode()
    assert f"| steps | {STEPS - 1:,} |" in card
    tokens = (STEPS - 1) * MINI.training.batch_size * LENGTH
    assert f"| tokens | {tokens:,} |" in card
    assert "## Evaluation" not in card  # that step was not evaluated
    assert "wall time" not in card


def check_cards(out, trained):
    """What the cards say is what the run recorded."""
    card = storage.read_bytes(f"{out.folder}/README.md").decode()
    assert 'license: "mit"' in card.partition("---\n\n")[0]
    tokens = STEPS * MINI.training.batch_size * LENGTH
    assert f"| tokens | {tokens:,} |" in card
    assert f"{trained.result['last']['loss']:.4f}" in card
    assert trained.manifest.key[:20] in card
    data = storage.read_bytes(f"{out.folder}/DATA.md").decode()
    assert "python-docs://" in data
    assert "Not stated" in data
    assert "Not searched for evaluation sets: tokenize" in data
    config = json.loads(storage.read_bytes(f"{out.folder}/config.json"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == SHAPE.rope_base
    assert to_json(SHAPE, LENGTH).items() <= config.items()
