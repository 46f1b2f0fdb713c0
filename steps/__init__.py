"""The step library: `from steps import sample, tokenize, train, ...`.

Every step and every artifact is an attribute of this package. The file that declares it is imported
at first access, which imports neither jax nor numpy.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pipeline

if not hasattr(pipeline, "Experiment"):
    raise ImportError(f"{pipeline.__file__} hides ponente's package 'pipeline'; rename it")

from steps.platforms import use_cpu_alone

use_cpu_alone()  # before anything imports jax

_FILES = {
    "artifacts": (
        *("Checkpoint", "Completions", "Documents", "GgufModel", "HuggingFaceModel", "Report"),
        *("Scores", "Sequences", "TokenCache", "Tokenizer"),
    ),
    "block_shuffle": ("block_shuffle",),
    "byte_tokenizer": ("byte_tokenizer",),
    "code_evaluation": ("code_evaluation",),
    "compare": ("compare",),
    "continue_training": ("extend", "warm_start"),
    "downstream": ("lm_evaluation", "multiple_choice"),
    "evaluate": ("evaluate",),
    "export_gguf": ("export_gguf",),
    "export_hf": ("export_hf",),
    "follow": ("follow",),
    "generate": ("generate",),
    "import_hf": ("import_hf",),
    "integer_rows": ("integer_rows",),
    "ladder": ("ladder",),
    "load": ("load",),
    "mix": ("Phase", "mix"),
    "pack": ("pack",),
    "report": ("report",),
    "sample": ("sample",),
    "scaling": ("scaling",),
    "scoring.job": ("Also",),
    "tokenize_documents": ("tokenize",),
    "tokenizer": ("tokenizer",),
    "train": ("train",),
    "train_tokenizer": ("train_tokenizer",),
    "upload_hf": ("upload_hf",),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}
__all__ = list(_HOME)


class _Library(types.ModuleType):
    """This package; its attribute `train` is the step and not the module `steps.train`."""

    def __getattribute__(self, name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(f"steps.{_HOME[name]}"), name)
        return super().__getattribute__(name)


sys.modules[__name__].__class__ = _Library
