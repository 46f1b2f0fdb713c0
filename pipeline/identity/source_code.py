"""The source files of a step's code, and which of them changed since an output was built.

A step's code is the file it is written in and every first-party module that file imports,
recursively; imports inside functions count, because steps import the training loop there. Imports
are read from the syntax tree and never executed, so planning does not import jax. A module is
first-party if it is below the folder of the step's top-level package, in the folder of a step's
file that is run as a script, or in the engine's checkout; the standard library, site-packages and
the engine itself are not. A module named only in a string (`importlib.import_module`) is not found.

Each file has two digests: of its bytes, and of its meaning (the syntax tree without comments,
docstrings and layout). To detect a change, the second is computed only where the first differs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_DIGITS = 16
_ENGINE = __name__.partition(".")[0]
_CHECKOUT = str(Path(__file__).resolve().parents[2])
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class Digest(NamedTuple):
    """Digests of one source file, 16 hex digits each: of its bytes, and of its meaning."""

    raw: str
    meaning: str


class _File:
    """One version of a source file; a file that does not parse has no imports."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.raw = hashlib.sha256(data).hexdigest()[:_DIGITS]
        self.imports = tuple(_imports(tree.body)) if (tree := self._parse()) else ()

    def _parse(self) -> ast.Module | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._data)
        except (SyntaxError, ValueError, RecursionError):
            return None

    @functools.cached_property
    def meaning(self) -> str:
        """Digest of the syntax tree; of the bytes where the file does not parse."""
        tree = self._parse()
        if tree is None:
            return self.raw
        text = "\n".join(_describe(tree))
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_DIGITS]


def _imports(body: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement at any depth. Visits statements only: expressions contain none."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            for name in _BODIES:
                yield from _imports(getattr(node, name, None) or ())


def _describe(node: ast.AST) -> Iterator[str]:
    # Not `ast.dump`, whose text differs between Python versions: the digest must not change when
    # Python is upgraded.
    yield type(node).__name__
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            yield name
            yield from _describe(value)
        elif isinstance(value, list):
            if isinstance(node, ast.JoinedStr):
                # Some versions put empty strings between the parts of an f-string.
                value = [each for each in value if getattr(each, "value", None) != ""]
            if value:
                yield name
                for each in value:
                    if not isinstance(each, ast.AST):
                        yield repr(each)
                    elif not _is_comment(each):
                        yield from _describe(each)
                yield "]"
        elif value is not None and name != "kind":
            yield f"{name} {value!r}"
    yield ")"


def _is_comment(node: ast.AST) -> bool:
    """Whether the node is a string as a statement: a docstring, or a comment in quotes."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _stamp(path: str) -> tuple[int, int] | None:
    """Modification time and size of a file or folder, to detect a change; None if it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_files: dict[str, tuple[tuple[int, int], _File]] = {}


class _Walk:
    """The files reached from the file `start` of the module `module`.

    Attributes:
        files: name -> (path, file), sorted by name.
    """

    def __init__(self, start: str, module: str) -> None:
        home = _home(start, module)
        self._roots, self._only = [home], ""
        if not {"site-packages", "dist-packages"}.isdisjoint(home.split(os.sep)):
            # Other packages are in the same folder, so only the step's own package is first-party.
            self._only = os.path.relpath(start, home).split(os.sep)[0].removesuffix(".py")
        else:
            script = [os.path.dirname(start)] if module == "__main__" else []
            self._roots = list(dict.fromkeys([*script, home, _CHECKOUT]))
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self._stack = [start]
        self._load(home, os.path.relpath(os.path.dirname(start), home).split(os.sep))
        found: dict[str, tuple[str, _File]] = {}
        paths: set[str] = set()
        while self._stack:
            path = self._stack.pop()
            if path not in paths and (file := self._read(path)) is not None:
                paths.add(path)
                folders = (f for f in (home, *self._roots) if path.startswith(f + os.sep))
                name = os.path.relpath(path, next(folders, os.path.dirname(path)))
                found[name.replace(os.sep, "/")] = (path, file)
                for statement in file.imports:
                    self._follow(path, statement)
        self.files = dict(sorted(found.items()))

    def fresh(self) -> bool:
        """Whether all files that were read and folders that were searched are unchanged."""
        return all(_stamp(path) == then for path, then in self._stamps.items())

    def _read(self, path: str) -> _File | None:
        stamp = self._stamps[path] = _stamp(path)
        if stamp is None:
            return None
        if path not in _files or _files[path][0] != stamp:
            _files[path] = (stamp, _File(Path(path).read_bytes()))
        return _files[path][1]

    def _follow(self, path: str, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self._top(alias.name.split("."))
            return
        parts = statement.module.split(".") if statement.module else []
        names = [alias.name for alias in statement.names]
        if not statement.level:
            self._top(parts, names)
            return
        base = os.path.abspath(os.path.join(path, *[os.pardir] * statement.level))
        # As in Python, a relative import must not leave the top-level package.
        if any(base.startswith(root + os.sep) for root in self._roots):
            self._load(base, parts, names)

    def _top(self, parts: list[str], names: Iterable[str] = ()) -> None:
        top = parts[0]
        if top == _ENGINE or top in sys.stdlib_module_names or (self._only or top) != top:
            return
        for root in self._roots:
            base = os.path.join(root, top)
            if os.path.isdir(base) or os.path.isfile(base + ".py"):
                return self._load(root, parts, names)
            self._stamps.setdefault(root, _stamp(root))

    def _load(self, folder: str, parts: list[str], names: Iterable[str] = ()) -> None:
        """Push the files of the module `parts` below `folder`, its packages, and `names` in it."""
        inner: str | None = folder
        for part in parts:
            if inner is not None:
                inner = self._module(inner, part)
        for name in names if inner is not None else ():
            if name == "*":
                # `__all__` may name submodules, but only executing the package would show which.
                self._stack += map(str, Path(inner or "").glob("*.py"))
            else:
                self._module(inner or "", name)

    def _module(self, folder: str, name: str) -> str | None:
        """Push the file of module `name` in `folder`; returns the folder of its submodules, if any.

        Records stamps of the folders, as a file that appears in one could become module `name`.
        """
        inner = os.path.join(folder, name)
        for searched in (folder, inner):
            if searched not in self._stamps:
                self._stamps[searched] = _stamp(searched)
        for file in (os.path.join(inner, "__init__.py"), inner + ".py"):
            if os.path.isfile(file):
                self._stack.append(file)
                return inner if file.endswith("__init__.py") else None
        return inner if self._stamps[inner] is not None else None


def _home(path: str, module: str) -> str:
    """The folder that contains the top-level package (or the only file) of the module at `path`."""
    folder, name = os.path.split(path)
    packages = module.split(".") if name == "__init__.py" else module.split(".")[:-1]
    suffix = os.sep + os.sep.join(packages)
    if packages and folder.endswith(suffix):
        return folder.removesuffix(suffix)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


_walks: dict[tuple[str, str], _Walk] = {}


def _files_of(function: Callable[..., Any]) -> dict[str, tuple[str, _File]]:
    """Name -> (path, file) of every file of a step's code, sorted; empty if it has no file."""
    function = inspect.unwrap(function)
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    if path is None:
        return {}
    key = os.path.abspath(path), function.__module__
    if key not in _walks or not _walks[key].fresh():
        _walks[key] = _Walk(*key)
    return _walks[key].files


def digests(function: Callable[..., Any]) -> dict[str, Digest]:
    """Digests of the files of a step's code, by path relative to the folder they share.

    Recorded with an output, as JSON, for `changed`.
    """
    return {name: Digest(file.raw, file.meaning) for name, (_, file) in _files_of(function).items()}


def changed(function: Callable[..., Any], recorded: Mapping[str, Any]) -> list[str]:
    """Names of the files whose meaning changed, and of those added or removed.

    Args:
        function: the step's function.
        recorded: the `digests` when the output was built, possibly decoded from JSON.

    Returns:
        Sorted names; empty when nothing was recorded, or the function has no source file now.
    """
    now = _files_of(function)
    if not now or not recorded:
        return []
    different = set(now) ^ set(recorded)
    for name in set(now) & set(recorded):
        file, record = now[name][1], recorded[name]
        # A record that is not a pair of digests matches no file.
        known = list(record) if isinstance(record, (list, tuple)) else []
        if file.raw not in known[:1] and file.meaning not in known[1:2]:
            different.add(name)
    return sorted(different)
