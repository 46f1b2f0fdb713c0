"""The source files of a step's code, and which of them changed since an output was built.

A step's code is the file it is written in and every first-party module that file imports,
recursively, inside functions too. Imports are read from the syntax tree and never executed, so
planning does not import jax. A module is first-party if it is below the folder of the step's
top-level package, in the folder of a script, or in the engine's checkout; the standard library,
site-packages and the engine itself are not, nor is a module named only in a string.

What is recorded with an output is the code that built it: a module that this process has imported
counts as it was then, whatever its file says now.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.identity.source_file import SourceFile, digest_of

_NAMED = 3  # files named in a message
_DEPTH = 8  # of nested containers whose values count
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_ALIKE = 0.5  # share of common statements from which two files are versions of one
_ENGINE = __name__.partition(".")[0]
_CHECKOUT = str(Path(__file__).resolve().parents[2])


class Digest(NamedTuple):
    """Digests of one source file, 16 hex digits each: of its bytes, and of its meaning."""

    raw: str
    meaning: str


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_files: dict[str, tuple[tuple[int, int], SourceFile]] = {}
_walks: dict[tuple[str, str, bool], _Walk] = {}
_imported: dict[str, SourceFile] = {}  # by path: the version that this process imported
_modules: dict[str, tuple[Any, str]] = {}  # by module: its spec, another one after a reload; path
_foreign: set[str] = set()  # modules that are not first-party: thousands, looked at once


def remember() -> None:
    """Keep the sources of the first-party modules that were imported since the last call."""
    for name in [name for name in list(sys.modules) if name not in _foreign]:
        about = getattr(sys.modules.get(name), "__dict__", {})
        spec = about.get("__spec__")
        if name in _modules and _modules[name][0] is spec:
            continue
        path = os.path.abspath(about.get("__file__") or "")
        top = name.partition(".")[0]
        installed = not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))
        if top == _ENGINE or top in sys.stdlib_module_names or installed:
            _foreign.add(name)
            continue
        _modules[name] = spec, path
        if path.endswith(".py"):
            with contextlib.suppress(OSError):
                _imported[path] = SourceFile(Path(path).read_bytes())
                _walks.clear()


def imported_otherwise(files: Mapping[str, Digest]) -> dict[str, Digest]:
    """The files that this process imported with another meaning, and their digests."""
    remember()
    found = {}
    for module, (_, path) in _modules.items():
        if (now := _imported.get(path)) is None:
            continue
        inner = "/__init__.py" if os.path.basename(path) == "__init__.py" else ".py"
        then = files.get(name := module.replace(".", "/") + inner)
        if then and now.raw != then.raw and now.meaning != then.meaning:
            found[name] = Digest(now.raw, now.meaning)
    return found


class _Walk:
    """The files reached from a module's file, now or as `imported`: name -> (path, file)."""

    def __init__(self, start: str, module: str, imported: bool) -> None:
        self._imported = _imported if imported else {}
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
        found: dict[str, tuple[str, SourceFile]] = {}
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
        return all(_stamp(path) == then for path, then in self._stamps.items())

    def _read(self, path: str) -> SourceFile | None:
        if path in self._imported:
            return self._imported[path]
        stamp = self._stamps[path] = _stamp(path)
        if stamp is None:
            return None
        if path not in _files or _files[path][0] != stamp:
            _files[path] = (stamp, SourceFile(Path(path).read_bytes()))
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
        """Push the file of module `name` in `folder`; returns the folder of its submodules."""
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


@functools.cache
def _start(function: Callable[..., Any]) -> tuple[str, str] | None:
    function = inspect.unwrap(function)
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    return (os.path.abspath(path), function.__module__) if path is not None else None


def _files_of(
    function: Callable[..., Any], *, imported: bool = False
) -> dict[str, tuple[str, SourceFile]]:
    start = _start(function)
    if start is None:
        return {}
    key = *start, imported
    if key not in _walks or not _walks[key].fresh():
        _walks[key] = _Walk(*key)
    return _walks[key].files


def _all_files(
    functions: Iterable[Callable[..., Any]], *, imported: bool = False
) -> dict[str, tuple[str, SourceFile]]:
    found: dict[str, tuple[str, SourceFile]] = {}
    for function in functions:
        found |= _files_of(function, imported=imported)
    return found


def digests(*functions: Callable[..., Any]) -> dict[str, Digest]:
    """Digests of the files of a step's code, by path relative to the folder they share."""
    remember()
    found = _all_files(functions, imported=True)
    return {name: Digest(file.raw, file.meaning) for name, (_, file) in found.items()}


def record(function: Callable[..., Any], *called: Callable[..., Any]) -> dict[str, Any]:
    """A step's code and that of functions in its configuration, as JSON for manifests and builds.

    It has a digest of what was typed in no file.
    """
    found: dict[str, Any] = {"sources": digests(function, *called)}
    no_file = [each for each in (function, *called) if not _files_of(each, imported=True)]
    if no_file:
        typed = [typed_digest(each) for each in no_file]
        found["typed"] = typed[0] if len(typed) == 1 else digest_of(typed)
    if called:
        found["called"] = {each.__qualname__: definition(each) for each in called}
    return found if function in no_file else {**found, "defined": definition(function)}


def code_digest(code: Mapping[str, Any]) -> str:
    """One digest of a `record`: of what all files mean, whatever their names; empty for none."""
    meanings = {meaning for _, meaning in code["sources"].values()}
    typed = [code["typed"]] if "typed" in code else []
    return digest_of(sorted(meanings) + typed) if meanings else "".join(typed)


def typed_digest(function: Callable[..., Any]) -> str:
    """Digest of a function, and of what it uses of its own module, by their compiled code."""
    if isinstance(function, type):  # of a callable value
        function = vars(function).get("__call__", function)
    start = inspect.unwrap(function)
    known = getattr(start, "__globals__", {})
    words: list[str] = []
    stack, seen = [getattr(start, "__code__", None)], set()
    while stack:
        code = stack.pop()
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
        words += [code.co_code.hex(), repr(code.co_names), *map(_constant, code.co_consts)]
        stack += inner
        loads = (each for each in dis.get_instructions(code) if each.opname in _LOADS)
        for name in dict.fromkeys(each.argval for each in loads):
            value = known.get(name)
            members = vars(value) if isinstance(value, type) else {name: value}
            for member, each in members.items():
                if getattr(each, "__globals__", None) is known:
                    stack.append(getattr(each, "__code__", None))
                    each = [getattr(each, n, None) for n in ("__defaults__", "__kwdefaults__")]
                if not member.startswith("__") or isinstance(each, list):
                    words.append(f"{member} = {_constant(each)}")
    return digest_of(words) if words else ""


def _constant(value: Any, depth: int = _DEPTH) -> str:
    """Plain data as text, the same in every process; empty for what is no plain data."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        flat = (
            [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
        )
        texts = [_constant(each, depth - 1) for each in flat] if depth else []
        ordered = sorted(texts) if isinstance(value, set | frozenset) else texts
        return f"{type(value).__name__}{ordered}"
    plain = bool | int | float | complex | str | bytes | types.NoneType | types.EllipsisType
    return repr(value) if isinstance(value, plain) else ""


def definition(function: Callable[..., Any]) -> dict[str, Any]:
    """The file that a step is written in, as JSON for `other_step`; empty if it has none."""
    start, found = _start(function), _files_of(function, imported=True)
    for name, (path, file) in found.items():
        if start is not None and path == start[0]:
            folder = os.path.dirname(path)
            return {"file": name, "folder": folder, "statements": list(file.statements)}
    return {}


def other_step(function: Callable[..., Any], recorded: Mapping[str, Any]) -> str:
    """The file of another step of this name that built an output; empty when it was this step.

    A step is the same when its file is still part of the code; where the file was moved, or lies in
    another folder, when at least half of the statements of the two files are the same. `recorded`
    is its `record` when the output was built. Earlier versions recorded no definition; then one of
    the sources must be the same.
    """
    sources, defined, start = recorded.get("sources"), recorded.get("defined"), _start(function)
    if start is None or not sources:
        return ""
    if defined and start[0] == os.path.join(defined["folder"], os.path.basename(defined["file"])):
        return ""
    now = _files_of(function)
    if not defined:
        meanings = {file.meaning for _, file in now.values()}
        known = any(name in now or each[1] in meanings for name, each in sources.items())
        return "" if known or not now else ", ".join(list(sources)[:_NAMED])
    mine, file = definition(function), defined["file"]
    # A bare name such as train.py says little: many people have one.
    if not mine or (file in now and ("/" in file or defined["folder"] == mine["folder"])):
        return ""
    a, b = set(mine["statements"]), set(defined["statements"])
    there = os.path.join(defined["folder"], os.path.basename(file))
    return "" if len(a & b) >= _ALIKE * len(a | b) else there


def changed(
    function: Callable[..., Any], recorded: Mapping[str, Any], *called: Callable[..., Any]
) -> list[str]:
    """Sorted names of the files whose meaning changed since `recorded` digests, or came or went."""
    now = _all_files((function, *called))
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
