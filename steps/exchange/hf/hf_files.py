"""Readers of the files of a Hugging Face folder, with errors that name the file and the fault."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, for safetensors
import numpy as np
from safetensors import SafetensorError, safe_open

from models.hf.architectures import Architecture, from_json
from models.hf.tensors import Tensor
from models.shape.config import TransformerConfig
from pipeline.errors import InputError
from pipeline.store.decode import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
_HEAD = "lm_head.weight"
_ROWS = 4096  # rows of a table in memory at once
CHAT_TEMPLATE = "chat_template.jinja"
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in old files; ignored


def read_file(folder: str, name: str) -> bytes:
    """The contents of a file, or `InputError`."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; expected a Hugging Face folder with config.json, "
            "tokenizer.json and safetensors"
        ) from error


def read_json(folder: str, name: str) -> dict[str, Any]:
    """The JSON object in a file, or `InputError`."""
    path = os.path.join(folder, name)
    try:
        found = parse_json(read_file(folder, name))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found a {type(found).__name__}")
    return found


@dataclass(frozen=True)
class FolderModel:
    """What config.json and the safetensors of a folder are, as `transformers` reads them."""

    architecture: Architecture
    config: TransformerConfig  # its vocabulary is the rows of the embedding
    positions: int  # longest sequence, from config.json
    tensors: list[Tensor]  # all of them, in order
    content: Tensors


def read_model(folder: str, ignore_keys: Collection[str] = ()) -> FolderModel:
    """The model in a folder, after checking all but the values of its tensors.

    A head in the files that differs from the embedding is the model's, whether or not config.json
    ties the two.
    """
    architecture, config, positions = from_json(read_json(folder, "config.json"), ignore_keys)
    content = Tensors(folder)
    stored = replace(config, tied=config.tied and _HEAD not in content)
    # config.json may claim any number of layers: one tensor more than stored proves one missing.
    tensors = list(itertools.islice(architecture.tensors(stored), len(content) + 1))
    content.check({tensor.name: tensor.shape for tensor in tensors})
    if config.tied and not stored.tied and content.equal(_HEAD, tensors[0].name):
        stored, tensors = config, [tensor for tensor in tensors if tensor.name != _HEAD]
    return FolderModel(architecture, stored, positions, tensors, content)


class Tensors:
    """The safetensors files of a folder: model.safetensors, else the files of an index.

    Raises `InputError`: there is none, one is not readable, or the index is of other files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # As `transformers`: an index beside the single file is of an earlier model.
        single, index = (os.path.exists(os.path.join(folder, name)) for name in (SINGLE, INDEX))
        if single or not index:
            with self._open(SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
            return
        self._files = _weight_map(folder)
        for name in sorted(set(self._files.values())):
            with self._open(name) as file:
                listed = {tensor for tensor, of in self._files.items() if of == name}
                if differing := sorted(listed.symmetric_difference(file.keys())):
                    raise InputError(
                        f"{os.path.join(folder, INDEX)}: weight_map and the tensors of {name} "
                        f"differ in {differing[0]!r:.80}; export the model again"
                    )

    def _open(self, file: str) -> Any:
        path = os.path.join(self._folder, file)
        try:
            return safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path}: expected a safetensors file: {error}; export the model again"
            ) from error

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a tensor that is missing, has another shape, is not floating-point, or does not
        belong to the architecture."""
        left = {name for name in self._files if not name.endswith(_BUFFERS)} - shapes.keys()
        missing = sorted(shapes.keys() - self._files.keys())
        for names, what in ((missing, "is missing in the"), (sorted(left), "has no place in the")):
            if names:
                raise InputError(
                    f"{self._folder}: tensor {names[0]} {what} model of its config.json (of "
                    f"{len(names)} such tensors); export the model again"
                )
        for file in sorted({self._files[name] for name in shapes}):
            with self._open(file) as opened:
                for name in (name for name in shapes if self._files[name] == file):
                    stored, shape = opened.get_slice(name), shapes[name]
                    found, dtype = tuple(stored.get_shape()), stored.get_dtype()
                    if found != shape:
                        raise InputError(
                            f"{self._folder}: {name} in {file} has shape {found}; by config.json "
                            f"it is {shape}; export the model again"
                        )
                    if dtype not in _DTYPES:
                        raise InputError(
                            f"{self._folder}: {name} has dtype {dtype}; only {', '.join(_DTYPES)} "
                            "are read: a quantised model must be converted first"
                        )

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in its stored dtype."""
        with self._open(self._files[name]) as opened:
            return opened.get_tensor(name)

    def equal(self, one: str, other: str) -> bool:
        with self._open(self._files[one]) as first, self._open(self._files[other]) as second:
            left, right = first.get_slice(one), second.get_slice(other)
            rows = left.get_shape()[0]
            pieces = [slice(i, min(i + _ROWS, rows)) for i in range(0, rows, _ROWS)]
            return all(
                np.array_equal(left[at].astype(np.float32), right[at].astype(np.float32))
                for at in pieces
            )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)


def _weight_map(folder: str) -> dict[str, str]:
    """The file of every tensor, from the index."""
    path = os.path.join(folder, INDEX)
    found = read_json(folder, INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise InputError(
            f"{path}: weight_map: expected a file name for every tensor; export the model again"
        )
    for name, file in found.items():
        if not isinstance(file, str) or file != os.path.basename(file):
            raise InputError(
                f"{path}: weight_map: {name:.80}: expected the name of a file in the folder, found "
                f"{file!r:.80}; export the model again"
            )
    return found
