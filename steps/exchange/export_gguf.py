"""Export a model as a GGUF file, for llama.cpp and programs built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import GgufModel, HuggingFaceModel
from steps.exchange.gguf_types import TYPES

_SHARD = "gguf"


def check_dtype(owner: str, dtype: str) -> None:
    """Raise `InputError` unless a GGUF file can store numbers as `dtype`."""
    if dtype not in TYPES:
        raise InputError(
            f"{owner}: expected one of {', '.join(TYPES)}, found {dtype!r}; f16 is exact for most "
            "trained weights, q8_0 half as large"
        )


def _check(arguments: Mapping[str, Any]) -> None:
    check_dtype("export_gguf.dtype", arguments["dtype"])
    storage.join("", f"{arguments['name']}.gguf")  # refuses a name that is no file name


@step(output=GgufModel, version=1, check=_check)
def export_gguf(
    run: StepContext, model: HuggingFaceModel, *, dtype: str = "f16", name: str = "model"
) -> Result:
    """A GGUF file of a model that was exported for Hugging Face.

    Args:
        model: a model of the architecture Llama, Qwen3 or GPT-2.
        dtype: dtype of matrices: f16, bf16, q8_0 or f32.
        name: name of the model in the file; also the start of the file's name.
    """
    from steps.exchange.gguf.file import write_gguf
    from steps.exchange.local_files import read_locally, write_locally

    file = f"{name}-{dtype}.gguf"
    with (
        run.shard(_SHARD) as directory,
        read_locally(model.folder) as folder,
        write_locally(storage.join(directory, file)) as path,
    ):
        written = write_gguf(folder, path, dtype, name)
    if written.pop("composes"):
        run.warn(
            "the tokenizer normalizes text to NFC and llama.cpp does not: llama.cpp gives other "
            "ids to texts that are not in NFC"
        )
    kind = f"{written['architecture']}, tokenizer {written['pre_tokenizer']}"
    line = f"{file}: {kind}, {written['bytes'] / 1e6:,.1f} MB"
    return {**written, "file": file, "dtype": dtype, "headline": [line]}
