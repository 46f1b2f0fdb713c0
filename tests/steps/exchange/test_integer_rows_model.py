"""A model of rows of integers, which has no tokenizer: loaded in Python and exported."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import steps
from pipeline.errors import InputError
from pipeline.store import storage
from steps.cli.export import run, to_hf
from tests.steps.built import built
from tests.steps.exchange.hf_folders import NEEDS_ORACLE
from tests.training import tiny
from training.config import TrainConfig

pytestmark = [pytest.mark.slow, NEEDS_ORACLE]

VOCAB, LENGTH, ROWS, HELD_OUT = 24, 16, 96, 16
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB, vocab_multiple=32)
TRAIN = TrainConfig(steps=4, batch_size=8, compute_dtype="float32")


def test_it_has_logits_and_a_folder_for_transformers_but_no_text(tmp_path):
    """The same logits in all three; cards with rows and without bytes; a text is refused."""
    import torch
    from transformers import AutoModelForCausalLM

    source, store = str(tmp_path / "rows.parquet"), str(tmp_path / "store")
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))
    pq.write_table(pa.table({"input_ids": ids.tolist()}), source)
    tokens = steps.integer_rows(
        source, vocab_size=VOCAB, sequence_length=LENGTH, splits=(("validation", HELD_OUT),)
    )
    sequences = steps.block_shuffle(tokens, LENGTH, io_block_size=4, window_blocks=4)
    node = steps.train(sequences, MODEL, tiny.OPTIMIZER, TRAIN)
    exported = built(store, steps.export_hf(node, dtype="float32"), steps.HuggingFaceModel)
    trained = built(store, node, steps.Checkpoint)

    ours = steps.load(trained)
    ids = ids[0]
    with pytest.raises(InputError, match="this model was trained on rows of integers"):
        ours.generate("text")
    with pytest.raises(InputError, match="a tokenizer, which a GGUF file contains"):
        run([trained.path, "--to", "gguf", "--out", str(tmp_path / "x.gguf")])
    to_hf(trained.path, str(tmp_path / "verb"), "float32")
    for folder in (exported.folder, str(tmp_path / "verb")):
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = theirs(torch.tensor(ids[None])).logits[0, :, :VOCAB].numpy()
        np.testing.assert_allclose(ours(ids), logits, atol=1e-4)
    names = storage.list_names(exported.folder)
    assert not [name for name in names if "token" in name]
    assert json.loads(storage.read_bytes(f"{exported.folder}/config.json"))["eos_token_id"] is None
    card = storage.read_bytes(f"{exported.folder}/README.md").decode()
    assert "rows of integers, which have no text" in card
    data = storage.read_bytes(f"{exported.folder}/DATA.md").decode()
    assert "| split | rows | tokens |" in data
    assert f"| validation | {HELD_OUT} | {HELD_OUT * LENGTH} |" in data
