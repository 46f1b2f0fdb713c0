"""The step library: `from steps import sample, tokenize, train, ...`.

Every step and every artifact is an attribute of this package; `__init__.pyi` lists them with their
files. A file is imported at first access, which imports neither jax nor numpy.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pipeline

if not hasattr(pipeline, "Experiment"):
    raise ImportError(f"{pipeline.__file__} hides ponente's package 'pipeline'; rename it")

from steps.platforms import use_cpu_alone

use_cpu_alone()  # before anything imports jax

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_HOME = {
    imported.name: line.module
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom) and line.module
    for imported in line.names
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'steps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
