"""The one name a Python file is imported under, however it is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAIN = "__main__"

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


def module_name(function: Callable[..., Any]) -> str:
    """Name of the module a function is defined in, the same when its file is run as a script.

    `__main__` when there is no file, as in a notebook.
    """
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    if function.__module__ == _MAIN and file:
        return importable(file)[0]
    return function.__module__


def by_value(function: Callable[..., Any]) -> bool:
    """Whether a worker could not import a function under its name."""
    return function.__module__ == _MAIN or function.__module__ in outside
