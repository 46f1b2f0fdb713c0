"""Which source files a step's code consists of, and whether they changed since an output was built.

A step's code is the file it is written in and every first-party module that file imports, in turn;
imports inside functions count, for that is where steps import the training loop. Modules are found
by reading import statements and never by importing, so planning stays free of jax. First-party is
what lies under the folder that holds the step's own top-level package, beside a step's file that is
run as a script, or beside the engine in its checkout; never the standard library, site-packages or
the engine itself. A module named only in a string (`importlib.import_module`) is not seen.

Each file has two digests: of its bytes, and of its meaning (the syntax tree without comments,
docstrings and layout). Only where the bytes differ is a file parsed, so a plan of unchanged code
parses nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_DIGITS = 16
_ENGINE = __name__.partition(".")[0]
_CHECKOUT = str(Path(__file__).resolve().parents[2])
_INSTALLED = {"site-packages", "dist-packages"}

# Strings and comments are matched so that what looks like an import inside them is passed over.
# An import statement starts a line or follows `;` or `:`. Its names end with the line, which a
# backslash at its end carries on, or with the closing parenthesis.
_TOKENS = re.compile(
    r"""
    "{3}(?:[^"\\]++|\\.|"(?!""))*+"{3} | '{3}(?:[^'\\]++|\\.|'(?!''))*+'{3}
  | "(?:[^"\\\n]++|\\.)*+" | '(?:[^'\\\n]++|\\.)*+'
  | \#[^\n]*
  | (?:^|[;:])[ \t\f]*(?:
        import (?=[\s\\]) (?P<modules>(?:\\\r?\n|[^\n;\#\\])+)
      | from (?=[\s.\\]) (?P<source>(?:\\\r?\n|[\w. \t])+?) \b import (?=[\s(*\\])
        (?:\\\r?\n|[ \t])* (?P<names>\((?:[^)\#]|\#[^\n]*)*\) | (?:\\\r?\n|[^\n;\#\\])+)
    )
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_COMMENT = re.compile(r"#[^\n]*")


class Digest(NamedTuple):
    """Digests of one source file, 16 hex digits each: of its bytes, and of what they mean."""

    raw: str
    meaning: str


class Import(NamedTuple):
    """`from <level dots><module> import <names>`; `import a.b` is (0, "a.b", no names)."""

    level: int
    module: str
    names: tuple[str, ...]


def imports(text: str) -> Iterator[Import]:
    """Every import statement of a source text, at any depth, also of one that does not parse."""
    for match in _TOKENS.finditer(text):
        kind = match.lastgroup
        if kind == "modules":
            for module in _words(match["modules"]):
                yield Import(0, module, ())
        elif kind == "names":
            module = re.sub(r"[\s\\]", "", match["source"])
            bare = module.lstrip(".")
            yield Import(len(module) - len(bare), bare, tuple(_words(match["names"])))


def _words(clause: str) -> Iterator[str]:
    """The first word of each comma-separated part: what is imported, not what it is called."""
    for part in re.sub(r"[()\\]", " ", _COMMENT.sub("", clause)).split(","):
        if words := part.split():
            yield words[0]


class _File:
    """One version of a source file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.raw = hashlib.sha256(data).hexdigest()[:_DIGITS]
        self.imports = tuple(imports(data.decode("utf-8", "replace")))

    @functools.cached_property
    def meaning(self) -> str:
        """Digest of the syntax tree; where there is none, that of the bytes."""
        parts: list[str] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _write(ast.parse(self._data), parts)
        except (SyntaxError, ValueError, RecursionError):
            return self.raw
        return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:_DIGITS]


def _write(node: ast.AST, parts: list[str]) -> None:
    # Not `ast.dump`: its text differs between Python versions, and a store outlives an upgrade.
    parts.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            parts.append(field)
            _write(value, parts)
        elif isinstance(value, list):
            if isinstance(node, ast.JoinedStr):
                # Some versions put empty strings between the parts of an f-string.
                value = [v for v in value if getattr(v, "value", None) != ""]
            if value:
                parts.append(field)
                _write_list(value, parts)
        elif value is not None and field != "kind":
            parts.append(f"{field} {value!r}")
    parts.append(")")


def _write_list(values: list[Any], parts: list[str]) -> None:
    for value in values:
        if not isinstance(value, ast.AST):
            parts.append(repr(value))
        # A string that stands alone does nothing: a docstring, or a comment in quotes.
        elif not (
            isinstance(value, ast.Expr)
            and isinstance(value.value, ast.Constant)
            and isinstance(value.value.value, str)
        ):
            _write(value, parts)
    parts.append("]")


_files: dict[str, tuple[tuple[int, int], _File]] = {}


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size


def _read(path: str) -> tuple[tuple[int, int], _File]:
    """The file as it is now, from memory when time and size are those of the last look."""
    stamp = _stamp(path)
    known = _files.get(path)
    if known is None or known[0] != stamp:
        known = _files[path] = (stamp, _File(Path(path).read_bytes()))
    return known


class _Walk:
    """The files reached from one, and every folder looked into on the way.

    Args:
        start: the first file.
        home: the folder that holds the top-level package of `start`; names are relative to it.
        roots: folders in which a top-level module is looked for, in order.
        tops: top-level names that may be followed; None for all.

    Attributes:
        files: name -> (path, file), sorted by name.
    """

    def __init__(
        self, start: str, home: str, roots: tuple[str, ...], tops: frozenset[str] | None = None
    ) -> None:
        self._roots, self._tops = roots, tops
        self._folders: dict[str, tuple[int, frozenset[str]]] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        found: dict[str, _File] = {}
        stack = [start, *_packages_between(home, start)]
        while stack:
            path = stack.pop()
            if path in found:
                continue
            try:
                self._stamps[path], found[path] = _read(path)
            except OSError:
                continue
            for statement in found[path].imports:
                stack.extend(self._targets(path, statement))
        named = {}
        for path, file in found.items():
            folder = _holder(path, (home, *roots)) or os.path.dirname(path)
            named[os.path.relpath(path, folder).replace(os.sep, "/")] = (path, file)
        self.files = dict(sorted(named.items()))

    def fresh(self) -> bool:
        """Whether no file that was read and no folder that was looked into changed since."""
        try:
            return all(_stamp(path) == then for path, then in self._stamps.items()) and all(
                os.stat(folder).st_mtime_ns == then for folder, (then, _) in self._folders.items()
            )
        except OSError:
            return False

    def _targets(self, path: str, statement: Import) -> Iterator[str]:
        level, module, names = statement
        if level:
            base = os.path.abspath(os.path.join(path, *[os.pardir] * level))
            # Beyond the top-level package Python refuses too.
            if base not in self._roots and _holder(base, self._roots) is not None:
                yield from self._locate(base, module, names)
            return
        top = module.partition(".")[0]
        if top == _ENGINE or top in sys.stdlib_module_names:
            return
        if self._tops is not None and top not in self._tops:
            return
        for root in self._roots:
            if top in self._entries(root) or f"{top}.py" in self._entries(root):
                yield from self._locate(root, module, names)
                return

    def _locate(self, folder: str, module: str, names: tuple[str, ...]) -> Iterator[str]:
        """Files of `module` under `folder`, its packages' own, and those of names in it."""
        for part in module.split(".") if module else ():
            found, inner = self._look(folder, part)
            if found is not None:
                yield found
            if inner is None:
                return
            folder = inner
        for name in names:
            if name == "*":
                # Its `__all__` may name submodules, and only running the package would tell.
                yield from (
                    os.path.join(folder, entry)
                    for entry in self._entries(folder)
                    if entry.endswith(".py")
                )
            else:
                found, _ = self._look(folder, name)
                if found is not None:
                    yield found

    def _look(self, folder: str, name: str) -> tuple[str | None, str | None]:
        """(source file, folder of submodules) of the module `name` in `folder`; None for none."""
        entries = self._entries(folder)
        if name in entries:
            inner = os.path.join(folder, name)
            if "__init__.py" in self._entries(inner):
                return os.path.join(inner, "__init__.py"), inner
        if f"{name}.py" in entries:
            return os.path.join(folder, f"{name}.py"), None
        return None, os.path.join(folder, name) if name in entries else None

    def _entries(self, folder: str) -> frozenset[str]:
        if folder not in self._folders:
            try:
                time = os.stat(folder).st_mtime_ns
                self._folders[folder] = (time, frozenset(os.listdir(folder)))
            except OSError:
                return frozenset()
        return self._folders[folder][1]


def _packages_between(home: str, path: str) -> list[str]:
    """The `__init__.py` of every package from `home` down to the file `path`, if there is one."""
    found, folder = [], os.path.dirname(path)
    while folder.startswith(home + os.sep):
        if os.path.isfile(init := os.path.join(folder, "__init__.py")):
            found.append(init)
        folder = os.path.dirname(folder)
    return found


def _holder(path: str, folders: tuple[str, ...]) -> str | None:
    """The first of `folders` that `path` is in."""
    return next((f for f in folders if path.startswith(f.rstrip(os.sep) + os.sep)), None)


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
    start, module = os.path.abspath(path), function.__module__
    walk = _walks.get((start, module))
    if walk is None or not walk.fresh():
        walk = _walks[start, module] = _walk(start, module)
    return walk.files


def _walk(start: str, module: str) -> _Walk:
    home = _home(start, module)
    if _is_installed(home):
        # Only its own package: beside it lies everybody else's code.
        top = os.path.relpath(start, home).split(os.sep)[0].removesuffix(".py")
        return _Walk(start, home, (home,), frozenset({top}))
    roots = [os.path.dirname(start), home] if module == "__main__" else [home]
    if not _is_installed(_CHECKOUT):
        roots.append(_CHECKOUT)
    return _Walk(start, home, tuple(dict.fromkeys(roots)))


def _is_installed(folder: str) -> bool:
    return not _INSTALLED.isdisjoint(folder.split(os.sep))


def _home(path: str, module: str) -> str:
    """The folder that holds the top-level package (or the only file) of the module at `path`."""
    folder, name = os.path.split(path)
    packages = module.split(".") if name == "__init__.py" else module.split(".")[:-1]
    suffix = os.sep + os.sep.join(packages)
    if packages and folder.endswith(suffix):
        return folder.removesuffix(suffix) or os.sep
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def reach(function: Callable[..., Any]) -> tuple[Path, ...]:
    """The files a step's code consists of, sorted by name; empty for one without a source file."""
    return tuple(Path(path) for path, _ in _files_of(function).values())


def digests(function: Callable[..., Any]) -> dict[str, Digest]:
    """Digests of the files a step's code consists of, by path relative to the folder they share.

    Parses each file once a process; to be recorded with an output, as JSON, for `changed`.
    """
    return {name: Digest(file.raw, file.meaning) for name, (_, file) in _files_of(function).items()}


def changed(function: Callable[..., Any], recorded: Mapping[str, Any]) -> list[str]:
    """Names of the files whose meaning is not the recorded one, and of those added or removed.

    Args:
        function: the step's function.
        recorded: what `digests` said when the output was built, possibly back from JSON.

    Returns:
        Sorted names; empty when nothing was recorded, or the function has no source file now.
    """
    now = _files_of(function)
    if not now or not recorded:
        return []
    different = set(now) ^ set(recorded)
    for name in set(now) & set(recorded):
        raw, meaning = _pair(recorded[name])
        file = now[name][1]
        if file.raw != raw and file.meaning != meaning:
            different.add(name)
    return sorted(different)


def _pair(recorded: Any) -> tuple[Any, Any]:
    """A digest back from JSON; what is none of ours equals no file's."""
    if isinstance(recorded, (list, tuple)) and len(recorded) == 2:
        return recorded[0], recorded[1]
    return None, None
