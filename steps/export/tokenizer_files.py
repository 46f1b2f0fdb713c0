"""The files by which `transformers` knows a tokenizer: tokenizer.json and two beside it.

`AutoTokenizer` gives the ids of training: nothing is put before or after a text. Documents were
divided by EOS in training, so it is named as BOS too. The text of a special token is read as that
token, as everywhere in `transformers`; in training it was text, which `split_special_tokens=True`
gives in a call.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from data.tokenizer.text_tokenizer import TextTokenizer
from pipeline.errors import InputError
from pipeline.store import storage

_PROBE = "a"


def write_tokenizer_files(
    tokenizer: TextTokenizer, folder: str, vocab_size: int, model_max_length: int
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Args:
        tokenizer: the one of training.
        folder: URL to write to.
        vocab_size: rows of the exported embedding; those beyond the tokenizer's ids are padding.
        model_max_length: positions the model was trained on.

    Raises:
        InputError: the tokenizer has more ids than `vocab_size`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"tokenizer: {tokenizer.vocab_size} ids, more than the model's {vocab_size}; export "
            "with the tokenizer it was trained with"
        )
    description = _plain(tokenizer.content)
    (eos,) = (t["content"] for t in description["added_tokens"] if t["id"] == tokenizer.eos_id)
    special = {"bos_token": eos, "eos_token": eos}
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        # Any class of a model's own would put its pre-tokenizer in the place of this one.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    for name, content in (
        ("tokenizer.json", description),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        storage.write_atomic(storage.join(folder, name), text.encode())


def _plain(content: bytes) -> dict:
    """A tokenizer.json that neither cuts, pads nor adds tokens."""
    description = {**json.loads(content), "truncation": None, "padding": None}
    if inserted(Tokenizer.from_str(json.dumps(description))) != ([], []):
        description["post_processor"] = None
    return description


def inserted(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that encoding puts before a text and after it.

    Raises:
        InputError: the text's own ids are not among what is encoded.
    """
    own = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    ids = tokenizer.encode(_PROBE).ids
    for start in range(len(ids) - len(own) + 1):
        if ids[start : start + len(own)] == own:
            return ids[:start], ids[start + len(own) :]
    raise InputError(
        f"tokenizer.json: its post-processor makes {ids} of {own}; expected tokens before or "
        "after the text's own and no others"
    )
