"""Use an existing tokenizer: a tokenizer.json on a disk, in a bucket or on the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from data.read.listing import absolute, list_source
from pipeline import External, InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import Tokenizer
from steps.gang import HUB

if TYPE_CHECKING:
    from data.tokenizer.text_tokenizer import TextTokenizer

_FILE = "tokenizer.json"
_MOST_BYTES = 256 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def _place(source: Any) -> Any:
    """URL of the tokenizer.json that `source` names."""
    if not isinstance(source, str) or not source:
        return source
    if storage.is_local(source):
        path = storage.local_path(source)
        hub_id = _HUB_ID.fullmatch(source) and source[0] != "." and not source.endswith(".json")
        if hub_id and not os.path.lexists(path):
            source = f"hf://{source}"
        else:
            return os.path.join(path, _FILE) if os.path.isdir(path) else absolute(source)
    return source if source.endswith(".json") else f"{source.rstrip('/')}/{_FILE}"


def _check(arguments: Mapping[str, Any]) -> None:
    size = arguments["vocab_size"]
    if size is not None and size < 1:
        raise InputError(f"tokenizer: vocab_size={size}: expected at least 1; leave it out")


@step(output=Tokenizer, version=2, cpus=0, check=_check, environment=HUB)
def tokenizer(
    run: StepContext,
    source: Annotated[str, External(list_source, _place)],
    *,
    eos: str | None = None,
    bos: str | None = None,
    vocab_size: int | None = None,
    lossy: bool = False,
) -> Result:
    """An existing tokenizer.json, tested for a lossless round trip of difficult texts.

    Args:
        source: a file, or a folder with a tokenizer.json: local, `gs://`, `https://`, or
            `hf://owner/name@<commit>`; a hub id `owner/name` if no such file exists. The key
            depends on the file's contents and not on its URL.
        eos: name of the token that ends a document; None to look for well-known names.
        bos: name of the token that begins one; None for the one that the file's post-processor
            inserts, or without it EOS.
        vocab_size: size of a vocabulary that is padded beyond the tokenizer's entries.
        lossy: accept a tokenizer that changes or loses text, such as WordPiece. Bits per byte are
            then approximate.

    Raises:
        InputError: there is no tokenizer.json, it changes or loses text, or its EOS is unknown.
    """
    from data.read.byte_ranges import file_state, open_ranges
    from data.tokenizer.text_tokenizer import TextTokenizer
    from data.tokenizer.tokenizer_file import with_fields

    state = file_state(source)
    if state.size > _MOST_BYTES:
        raise InputError(f"{source}: expected a tokenizer.json, found {state.size:,} bytes")
    with open_ranges(source, state) as file:
        content = file.read()
    try:
        content = with_fields(
            content, eos_token=eos, bos_token=bos, vocab_size=vocab_size, lossy=lossy
        )
        loaded = TextTokenizer(content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    with run.shard("tokenizer") as directory:
        storage.write_atomic(storage.join(directory, _FILE), content)
    return {
        "vocab_size": loaded.vocab_size,
        "digest": loaded.digest,
        "eos_id": loaded.eos_id,
        "bos_id": loaded.bos_id,
        "headline": [
            f"{loaded.vocab_size:,} ids, a document begins with {_shown(loaded, loaded.bos_id)} "
            f"and ends with {_shown(loaded, loaded.eos_id)}"
        ],
    }


def _shown(loaded: TextTokenizer, index: int) -> str:
    return f"{loaded.decode([index])!r} ({index})"
