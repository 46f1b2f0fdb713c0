"""Readers of the files of a Hugging Face folder, with errors that name the file and the fault."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, for safetensors
import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline.errors import InputError
from pipeline.store.decode import parse_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in old files; ignored


def read_file(folder: str, name: str) -> bytes:
    """The contents of a file. Raises `InputError` if it cannot be read."""
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
    """The JSON object in a file. Raises `InputError` if the file is not a readable JSON object."""
    path = os.path.join(folder, name)
    try:
        found = parse_json(read_file(folder, name))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found a {type(found).__name__}")
    return found


class Tensors:
    """The safetensors files of a folder.

    Raises:
        InputError: the folder has none, or one is not readable.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._tied = config.get("tie_word_embeddings", True)
        if os.path.exists(os.path.join(folder, _INDEX)):
            self._files = _weight_map(folder)
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
        """Refuse a tensor that is missing, has another shape, is not floating-point, or does not
        belong to the architecture."""
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
                    found = opened.get_slice(name) if name in stored else None
                    self._check_one(name, found, shapes[name])

    def _check_one(self, name: str, stored: Any, shape: tuple[int, ...]) -> None:
        found = None if stored is None else tuple(stored.get_shape())
        if found != shape:
            raise InputError(
                f"{self._folder}: {name} in {self._files[name]} has shape {found}; by config.json "
                f"it is {shape}; export the model again"
            )
        if (dtype := stored.get_dtype()) not in _DTYPES:
            raise InputError(
                f"{self._folder}: {name} has dtype {dtype}; only {', '.join(_DTYPES)} are read: a "
                "quantised model must be converted first"
            )

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor in its stored dtype."""
        with self._open(self._files[name]) as opened:
            return opened.get_tensor(name)

    def __len__(self) -> int:
        return len(self._files)


def _weight_map(folder: str) -> dict[str, str]:
    """The file of every tensor, from the index."""
    found = read_json(folder, _INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise InputError(
            f"{os.path.join(folder, _INDEX)}: weight_map: expected a file name for every tensor; "
            "export the model again"
        )
    return found
