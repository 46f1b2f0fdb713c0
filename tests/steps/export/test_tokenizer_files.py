"""The tokenizer of an exported model: `AutoTokenizer` gives the ids of training."""

from __future__ import annotations

import json

import pytest

from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from steps.export.tokenizer_files import write_tokenizer_files
from tests.data.tokenizer.split_tokenizers import documents, tokenizer_json
from tests.steps.export.hf_folders import NEEDS_ORACLE

pytestmark = pytest.mark.slow  # imports transformers

TEXTS = [
    *documents(8),
    "",
    " ",
    "\n\n  tab\tand  spaces  ",
    "naïve café 東京 🦙🦙 \u200d\u00a0 3.14159 don't I'LL",
    "e\u0301 composed or not \u00e9",
    f"not{EOS}a boundary",
]


def auto_tokenizer(folder, model_type: str = ""):
    """The tokenizer in a folder, beside the config.json of such a model."""
    from transformers import AutoTokenizer

    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder)


@NEEDS_ORACLE
@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        *(("gpt2", kind) for kind in ("", "llama", "qwen3", "gpt2", "nanochat")),
        ("llama3", "qwen3"),
        ("qwen2", "llama"),
    ],
)
def test_ids_are_those_of_training(tmp_path, name, model_type):
    """Of every text, beside every kind of model, with nothing inserted; and they decode to it."""
    ours = TextTokenizer(tokenizer_json(name))
    write_tokenizer_files(ours, str(tmp_path), 1024, 77)
    theirs = auto_tokenizer(tmp_path, model_type)
    ids, lengths = ours.encode_batch(TEXTS)
    found = theirs(TEXTS, split_special_tokens=True).input_ids
    assert [i for row in found for i in row] == ids.tolist()
    assert [len(row) for row in found] == lengths.tolist()
    assert theirs.bos_token_id == theirs.eos_token_id == ours.eos_id
    assert theirs.model_max_length == 77
    assert theirs.decode(found[0]) == ours.decode(found[0])
    # As everywhere in transformers, and without a surprise in any other text.
    assert theirs(TEXTS[:-1]).input_ids == found[:-1]
    assert ours.eos_id in theirs(TEXTS[-1]).input_ids


@NEEDS_ORACLE
def test_what_a_tokenizer_inserts_cuts_or_pads_is_left_out(tmp_path):
    """Training did none of it. Our own field, which libraries refuse, is left out too."""
    special = {"id": "<s>", "ids": [7], "tokens": ["<s>"]}
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    second = {"Sequence": {"id": "A", "type_id": 0}}
    description = json.loads(tokenizer_json("gpt2"))
    description |= {
        "eos_token": EOS,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, second],
            "pair": [first, second, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": special},
        },
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
    }
    ours = TextTokenizer(json.dumps(description).encode())
    write_tokenizer_files(ours, str(tmp_path), ours.vocab_size, 64)
    assert auto_tokenizer(tmp_path)(TEXTS[0]).input_ids == ours.encode_batch(TEXTS[:1])[0].tolist()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    """Before a file is written."""
    ours = TextTokenizer(tokenizer_json("gpt2"))
    with pytest.raises(InputError, match="1000 ids, more than the model's 999"):
        write_tokenizer_files(ours, str(tmp_path), 999, 64)
    assert not list(tmp_path.iterdir())
