"""The files of a Hugging Face folder, read with errors that say what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline.errors import InputError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # of old files; no parameters


def read_file(folder: str, name: str) -> bytes:
    """The content of a file. Raises `InputError` when it cannot be read."""
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
    """A file of JSON. Raises `InputError` when it cannot be read as that."""
    try:
        return json.loads(read_file(folder, name))
    except ValueError as error:
        raise InputError(f"{os.path.join(folder, name)}: not JSON: {error}") from error


class Tensors:
    """The safetensors files of a folder.

    Raises:
        InputError: there are none, or one is not readable.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._tied = config.get("tie_word_embeddings", True)
        if os.path.exists(os.path.join(folder, _INDEX)):
            self._files = dict(read_json(folder, _INDEX)["weight_map"])
        else:
            with self._open(_SINGLE) as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        path = os.path.join(self._folder, os.path.basename(file))
        try:
            return safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path}: expected a safetensors file: {error}; export the model again"
            ) from error

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a tensor that is missing, of another shape, or of no use to the architecture."""
        left = {name for name in self._files if not name.endswith(_BUFFERS)} - shapes.keys()
        if self._tied:
            left.discard("lm_head.weight")
        missing = sorted(shapes.keys() - self._files.keys())
        for names, what in ((sorted(left), "has no place in the"), (missing, "is missing in the")):
            if names:
                raise InputError(
                    f"{self._folder}: tensor {names[0]} {what} model of its config.json (of "
                    f"{len(names)} such tensors); export the model again"
                )
        for file in sorted({self._files[name] for name in shapes}):
            with self._open(file) as opened:
                stored = set(opened.keys())
                for name in (name for name in shapes if self._files[name] == file):
                    found = tuple(opened.get_slice(name).get_shape()) if name in stored else None
                    if found != shapes[name]:
                        raise InputError(
                            f"{self._folder}: {name} in {file} has shape {found}; by config.json "
                            f"it is {shapes[name]}; export the model again"
                        )

    def dtype(self, name: str) -> str:
        """The dtype that a tensor is stored in, such as "BF16"."""
        with self._open(self._files[name]) as opened:
            return opened.get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in the dtype they are stored in."""
        with self._open(self._files[name]) as opened:
            return opened.get_tensor(name)
