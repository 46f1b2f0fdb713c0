"""The tokenizer of an exported model: `AutoTokenizer` gives the ids of training."""

from __future__ import annotations

import dataclasses
import json

import pytest

from data.tokenizer.special_tokens import EOS
from data.tokenizer.text_tokenizer import TextTokenizer
from data.tokenizer.tokenizer_file import with_fields
from models.hf.architectures import ARCHITECTURES
from pipeline.errors import InputError
from steps.exchange.hf.hf_folder import Export, write_configs
from steps.exchange.hf.tokenizer_files import (
    check_auto_tokenizer,
    read_tokenizer_files,
    write_tokenizer_files,
)
from tests.data.tokenizer.published_shapes import KEEPING, shape
from tests.data.tokenizer.split_tokenizers import documents, tokenizer_json
from tests.models.hf.shapes import SHAPES
from tests.steps.exchange.hf_folders import NEEDS_ORACLE

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


def auto_tokenizer(folder, model_type: str = "", **config):
    """The tokenizer in a folder, beside the config.json of such a model."""
    from transformers import AutoTokenizer

    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return AutoTokenizer.from_pretrained(folder)


MODELS = {known.model_type: known for known in ARCHITECTURES}


def _made(name: str) -> TextTokenizer:
    """The shape of a published tokenizer, or one with a BOS that nothing inserts."""
    if name != "named bos":
        return TextTokenizer(shape(name))
    return TextTokenizer(
        with_fields(shape("qwen"), bos_token="<|im_start|>", eos_token="<|im_end|>")
    )


@NEEDS_ORACLE
@pytest.mark.parametrize("model_type", ["", *MODELS])
@pytest.mark.parametrize("name", [*KEEPING, "named bos"])
def test_ids_are_those_of_training(tmp_path, name, model_type):
    """Of every text, beside every architecture, and BOS where the tokenizer's own file inserts it.

    Beside Qwen2, of which AutoTokenizer replaces the tokenizer, all but Qwen2's are refused.
    """
    ours = _made(name)
    if model_type == "qwen2" and name not in ("qwen", "named bos"):
        with pytest.raises(InputError, match=r"Qwen2ForCausalLM .* auto_tokenizer=False"):
            check_auto_tokenizer(ours, MODELS[model_type])
        return
    if model_type:
        check_auto_tokenizer(ours, MODELS[model_type])
    write_tokenizer_files(ours, str(tmp_path), 1024, 77)
    theirs = auto_tokenizer(tmp_path, model_type)
    first = [ours.bos_id] if name == "llama3" else []
    wanted = [[*first, *ours.encode_batch([text])[0].tolist()] for text in TEXTS]
    found = theirs(TEXTS, split_special_tokens=True).input_ids
    assert found == wanted
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert theirs.model_max_length == 77
    for ids in found:
        assert theirs.decode(ids) == ours.decode(ids)
    # As everywhere in transformers, and without a surprise in any other text.
    assert theirs(TEXTS[:-1]).input_ids == found[:-1]
    if name in ("gpt2", "qwen"):
        assert ours.eos_id in theirs(TEXTS[-1]).input_ids


@NEEDS_ORACLE
def test_what_a_tokenizer_appends_cuts_or_pads_is_left_out(tmp_path):
    """Training did none of it. Our own field, which libraries refuse, is left out too."""
    description = json.loads(shape("llama3"))
    bos, eos = (token["content"] for token in description["added_tokens"][:2])
    last = {"SpecialToken": {"id": eos, "type_id": 0}}
    description["post_processor"]["single"].append(last)
    known = description["post_processor"]["special_tokens"]
    known[eos] = {"id": eos, "ids": [known[bos]["ids"][0] + 1], "tokens": [eos]}
    description |= {
        "eos_token": eos,
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
    }
    ours = TextTokenizer(json.dumps(description).encode())
    write_tokenizer_files(ours, str(tmp_path), ours.vocab_size, 64)
    theirs = auto_tokenizer(tmp_path)
    assert theirs(TEXTS[0]).input_ids == ours.prompt_ids(TEXTS[0])
    assert theirs(TEXTS[0], TEXTS[1]).input_ids == [
        *ours.prompt_ids(TEXTS[0]),
        *ours.prompt_ids(TEXTS[1]),
    ]
    assert ours.prompt_ids("")[0] == known[bos]["ids"][0]


@NEEDS_ORACLE
def test_no_other_split_is_advised_for_a_large_vocabulary(tmp_path, caplog):
    """As transformers does of Mistral models that do not say what version wrote them."""
    description = json.loads(shape("gpt2"))
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"x{index}x": index for index in range(len(vocabulary), 100_002)}
    ours = TextTokenizer(json.dumps(description).encode())
    write_tokenizer_files(ours, str(tmp_path), ours.vocab_size, 64)
    auto_tokenizer(tmp_path, "mistral")
    assert "fix_mistral_regex" in caplog.text
    caplog.clear()
    config = dataclasses.replace(SHAPES["Mistral"], vocab_size=ours.vocab_size)
    export = Export(checkpoint="", config=config, positions=64, tokenizer=ours)
    write_configs(str(tmp_path), export)
    theirs = auto_tokenizer(tmp_path)
    assert "fix_mistral_regex" not in caplog.text
    assert theirs(TEXTS[0]).input_ids == ours.encode_batch(TEXTS[:1])[0].tolist()


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


@NEEDS_ORACLE
@pytest.mark.parametrize(
    ("name", "files", "bos", "eos"),
    [
        ("llama3", {}, "<|begin_of_text|>", "<|end_of_text|>"),
        ("llama3", {"tokenizer_config": {"eos_token": "<|eot_id|>"}}, None, "<|eot_id|>"),
        (
            "llama2",
            {
                "tokenizer_config": {
                    "add_bos_token": True,
                    "bos_token": {"content": "<s>", "__type": "AddedToken"},
                    "eos_token": {"content": "</s>", "__type": "AddedToken"},
                }
            },
            "<s>",
            "</s>",
        ),
        ("llama2", {"config": {"bos_token_id": 1, "eos_token_id": 2}}, "<s>", "</s>"),
        ("qwen", {"special_tokens_map": {"eos_token": "<tool_call>"}}, None, "<tool_call>"),
        ("llama2", {"config": {"bos_token_id": 300, "eos_token_id": 99_999}}, "</s>", "</s>"),
        ("llama2", {"config": {"bos_token_id": True, "eos_token_id": "1"}}, "</s>", "</s>"),
        (
            "qwen",
            {
                "tokenizer_config": {"bos_token": None, "eos_token": "<|im_end|>"},
                "config": {"bos_token_id": 998},
                "generation_config": {"eos_token_id": [999, 998]},
            },
            None,
            "<|im_end|>",
        ),
        ("qwen", {"generation_config": {"eos_token_id": [0, 1]}}, None, "<|endoftext|>"),
    ],
)
def test_a_folder_names_its_bos_and_eos(tmp_path, name, files, bos, eos):
    """As transformers reads it: what begins a text, what ends one, what encoding inserts."""
    (tmp_path / "tokenizer.json").write_bytes(shape(name))
    for file, content in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    ours = TextTokenizer(read_tokenizer_files(str(tmp_path)))
    if bos is not None:
        assert ours.decode([ours.bos_id]) == bos
    assert ours.decode([ours.eos_id]) == eos
    named = {**_FAST, **files.get("tokenizer_config", {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    theirs = auto_tokenizer(tmp_path)("one two").input_ids
    again = tmp_path / "again"
    again.mkdir()
    write_tokenizer_files(ours, str(again), 1024, 64)
    assert auto_tokenizer(again)("one two").input_ids == theirs
    prompt = ours.prompt_ids("one two")
    assert theirs in (prompt, prompt[1:])


def test_a_name_for_eos_overrides_the_folders(tmp_path):
    """And one that the vocabulary lacks is refused with those it has."""
    (tmp_path / "tokenizer.json").write_bytes(shape("qwen"))
    made = TextTokenizer(read_tokenizer_files(str(tmp_path), "<|im_start|>"))
    assert made.decode([made.eos_id]) == "<|im_start|>"
    with pytest.raises(InputError, match=r"eos='</s>' is not in the vocabulary; .*im_end"):
        read_tokenizer_files(str(tmp_path), "</s>")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    """Before a file is written."""
    ours = TextTokenizer(tokenizer_json("gpt2"))
    with pytest.raises(InputError, match="1000 ids, more than the model's 999"):
        write_tokenizer_files(ours, str(tmp_path), 999, 64)
    assert not list(tmp_path.iterdir())


@NEEDS_ORACLE
def test_other_classes_do_replace_the_tokenizer_of_a_qwen2_model(tmp_path):
    """Once this fails, transformers has stopped it and the refusal is of no more use."""
    ours = TextTokenizer(shape("gpt2"))
    write_tokenizer_files(ours, str(tmp_path), 1024, 77)
    found = auto_tokenizer(tmp_path, "qwen2")(TEXTS, split_special_tokens=True).input_ids
    assert found != [ours.encode_batch([text])[0].tolist() for text in TEXTS]
