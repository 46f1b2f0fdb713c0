"""The name a Python file is imported under, however it is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Import names of files that lie outside the engine's checkout, which is what workers receive: what
# is defined in these travels to workers by value.
outside: set[str] = set()


def importable(file: str) -> tuple[str, str]:
    """(dotted name, folder) of a Python file: with the folder on `sys.path` the name imports it."""
    path = Path(file).resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), str(folder)


def by_value(function: Callable[..., Any]) -> bool:
    """Whether a worker could not import a function under its name."""
    return function.__module__ == "__main__" or function.__module__ in outside
