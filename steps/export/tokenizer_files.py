"""Write the tokenizer files that `transformers` loads: tokenizer.json and two configurations.

`AutoTokenizer` then gives the ids of training and adds no tokens. EOS separated the documents in
training, so it is BOS too. As always in `transformers`, the text of a special token is encoded as
that token; training encoded it as plain text, as `split_special_tokens=True` does.
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
        tokenizer: tokenizer of training.
        folder: URL of the directory to write to.
        vocab_size: rows of the exported embedding; those beyond the tokenizer's ids are padding.
        model_max_length: tokens of a sequence in training.

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
        # A model-specific class would replace the pre-tokenizer with its own.
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
    """The tokenizer.json without truncation, padding and added tokens."""
    description = {**json.loads(content), "truncation": None, "padding": None}
    if inserted(Tokenizer.from_str(json.dumps(description))) != ([], []):
        description["post_processor"] = None
    return description


def inserted(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that encoding adds before a text and after it.

    Raises:
        InputError: the encoded ids do not contain the text's own ids.
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
