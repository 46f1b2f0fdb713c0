"""Convert a Hugging Face folder to a checkpoint, tensor by tensor."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from data.read.byte_ranges import open_ranges
from data.read.listing import find_files, list_folder, list_source
from data.tokenizer.text_tokenizer import TextTokenizer
from models.shape.config import TransformerConfig
from pipeline.errors import InputError
from pipeline.identity.listing import Listing
from pipeline.store import storage
from steps.exchange.hf.hf_files import FolderModel, read_model
from steps.exchange.hf.tokenizer_files import read_tokenizer_files
from training.checkpoint.restore import ModelWriter

_HUB = "hf://"
_PIECE = 1 << 24  # bytes copied at once


def list_model(source: str, seconds: float) -> Listing:
    """The current files of a folder on a disk or of a repository on the hub."""
    if source.startswith(_HUB):
        return list_source(f"{source.rstrip('/')}/*", seconds, _is_model_file)
    return list_folder(storage.local_path(source), seconds)


@contextlib.contextmanager
def opened(source: str) -> Iterator[str]:
    """A local path with the files of a source; files of the hub are in a temporary copy."""
    if not source.startswith(_HUB):
        yield storage.local_path(source)
        return
    with tempfile.TemporaryDirectory() as copy:
        for url, state in find_files(f"{source.rstrip('/')}/*", _is_model_file):
            name = url.rpartition("/")[2]
            with open_ranges(url, state) as remote, open(os.path.join(copy, name), "wb") as to:
                shutil.copyfileobj(remote, to, _PIECE)
        yield copy


def _is_model_file(name: str) -> bool:
    return name.endswith((".json", ".safetensors"))


def open_hf(
    folder: str, ignore_keys: Collection[str] = (), eos: str | None = None
) -> tuple[FolderModel, bytes, TextTokenizer]:
    """(model, tokenizer.json, tokenizer) of a folder, checked but for the values of its tensors.

    `eos` names the token that ends a document, instead of the folder's. Ids of the model that the
    tokenizer lacks are padding rows.
    """
    found = read_model(folder, ignore_keys)
    try:
        tokenizer_json = read_tokenizer_files(folder, eos)
        tokenizer = TextTokenizer(tokenizer_json)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    rows = found.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} ids and the model's vocab_size "
            f"is {rows}; they are not of one model"
        )
    config = _padded(found.config, tokenizer.vocab_size)
    return replace(found, config=config), tokenizer_json, tokenizer


def write_checkpoint(model: FolderModel, path: str) -> None:
    """Write the model's tensors as a checkpoint of step 0, in float32, one tensor at a time."""
    writer = ModelWriter(path, model.config)
    for tensor in model.tensors:
        values = model.content.read(tensor.name)
        for part, array in zip(tensor.parts, tensor.split(values), strict=True):
            first, *others = writer.shape(part.path)
            rows = (0, first) if part.layer is None else (part.layer, part.layer + 1)
            wide = np.ascontiguousarray(array, np.float32).reshape(-1, *others)
            writer.write(part.path, wide, rows)
    writer.finish()


def _padded(config: TransformerConfig, ids: int) -> TransformerConfig:
    """The shape with a vocabulary of `ids`, padded to the same number of rows."""
    rows = config.vocab_size
    if ids == rows:
        return config
    # The smallest multiple to which `ids` rounds up to exactly `rows`.
    multiple = next(n for n in range(rows - ids + 1, rows + 1) if rows % n == 0)
    return replace(config, vocab_size=ids, vocab_multiple=multiple)
