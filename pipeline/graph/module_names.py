"""The name a Python file is imported under, the same for every way to start it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Import names of files outside the engine's checkout. Workers receive the checkout only, so
# functions and classes of these files are pickled by value.
outside: set[str] = set()


def importable(file: str) -> tuple[str, str]:
    """(dotted name, folder) of a Python file: with folder on `sys.path`, the name imports it."""
    path = Path(file).resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), str(folder)


def by_value(function: Callable[..., Any]) -> bool:
    """Whether a function must be pickled by value, as a worker cannot import its module."""
    return function.__module__ == "__main__" or function.__module__ in outside
