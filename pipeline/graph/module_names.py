"""The names modules are imported under: a Python file's, and those of the engine's packages.

The names of the engine's packages are common. In a process that has imported the engine they are
found first, whatever a user has beside an experiment; those are named in the error of an import
that needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]  # the folder of the packages: a checkout's, or pip's
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


def add_outside(folder: str) -> None:
    """Add the imported modules below `folder` to `outside`: a user's own, beside an experiment."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (path := Path(file)).is_relative_to(folder):
            installed = {"site-packages", "dist-packages"} & set(path.parts)
            if not (installed or path.is_relative_to(HOME) or path.is_relative_to(sys.base_prefix)):
                outside.add(name)


def packages() -> set[str]:
    records = list(HOME.glob("ponente-*.dist-info/RECORD"))
    if records:  # installed by pip, among the packages of others
        paths = [line.split(",")[0] for line in records[0].read_text().splitlines()]
        found = {path.split("/")[0] for path in paths if path.count("/") == 1}
        return {name for name in found if (HOME / name / "__init__.py").is_file()}
    return {path.parent.name for path in HOME.glob("*/__init__.py")} - {"tests"}


def hiding(name: str, folders: Iterable[str]) -> str:
    """Path of the first module in the folders that has the name of ours `name`; else empty."""
    spec = PathFinder.find_spec(name, [f for f in folders if Path(f).resolve() != HOME])
    return _other(name, spec.origin, spec.submodule_search_locations) if spec else ""


def hidden(error: BaseException) -> str:
    """What to add to the error of a name that a package of ours lacks; empty for other errors."""
    name = getattr(error, "name", None) if type(error) is ImportError else None
    if isinstance(error, AttributeError):
        name = getattr(error.obj, "__name__", None)
    other = hiding(name, sys.path) if name in NAMES else ""
    return f"; ponente's package {name!r} hides {other}; rename that one" if other else ""


def _other(name: str, file: str | None, folders: Iterable[str] | None) -> str:
    place = file or next(iter(folders or ()), "")
    ours = (HOME / name, HOME / name / "__init__.py")
    return "" if not place or Path(place).resolve() in ours else place


NAMES = frozenset(packages())
NEIGHBOURS = NAMES - {"experiments"}  # where users of a checkout write


class _Finder:
    """Finds our packages, for Python's import system."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in NAMES:
            return None
        spec = PathFinder.find_spec(name, [str(HOME)] if path is None else path)
        if spec is None and (other := hiding(top, sys.path)):
            raise ModuleNotFoundError(
                f"no {name!r} in ponente's package {top!r}, which hides {other}; rename that one",
                name=name,
            )
        return spec


def come_first() -> None:
    """Have our packages found before a user's modules of the same names, in this process.

    Raises `ImportError` when one of the user's was imported already.
    """
    for name in NAMES & sys.modules.keys():
        module = sys.modules[name]
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
        if other := _other(name, file, folders):
            raise ImportError(f"{other} hides ponente's package {name!r}; rename it", name=name)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
