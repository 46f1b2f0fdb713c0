"""A graph as a function of settings: type-checked presets, and loading it from a Python file."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pipeline.errors import InputError, PonenteError, unknown
from pipeline.graph import module_names
from pipeline.graph.step import Node, as_node
from pipeline.identity import source_code
from pipeline.identity.secret_text import REMEDY, SECRET

R = TypeVar("R")
FULL = "full"  # the preset of the function's own defaults
loading: list[str] = []  # files being imported, innermost last


class Declaration(Generic[R]):
    """A function that declares a graph, with presets of its settings.

    Its keyword parameters are the settings, each with a default; it returns the wanted artifact or
    a tuple of artifacts. A preset has the settings that differ from the defaults; in `presets` they
    are frozen dataclasses of all settings, and "full" has the defaults. A setting of another type
    than its annotation, and one that looks like a secret, is an `InputError`.
    """

    def __init__(self, function: Callable[..., R], **presets: Mapping[str, Any]) -> None:
        self.function = function
        self.name = function.__name__
        defaults = _settings_class(function)()
        self.presets: dict[str, Any] = {FULL: defaults}
        source_code.remember()
        for name, values in presets.items():
            if name == FULL or name in self.setting_names:
                raise InputError(f"{self.name}: preset {name!r} is named like a setting; rename it")
            self.presets[name] = self._with(defaults, values, f"preset {name!r}")
        for preset, settings in self.presets.items():
            for name in self.setting_names:
                if SECRET.search(repr(getattr(settings, name))):
                    raise InputError(
                        f"{self.name}: setting {name!r} of preset {preset!r} looks like a secret, "
                        f"and settings are recorded in the store; {REMEDY}"
                    )

    @property
    def file(self) -> str:
        return os.path.realpath(self.function.__code__.co_filename)

    @property
    def setting_names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.presets[FULL])]

    def settings(self, preset: str | None = None, **settings: Any) -> Any:
        if (preset or FULL) not in self.presets:
            raise InputError(unknown("preset", preset or FULL, self.presets))
        return self._with(self.presets[preset or FULL], settings, self.name)

    def graph(self, preset: str | None = None, **settings: Any) -> list[Node]:
        return nodes(self.build(self.settings(preset, **settings)))

    def build(self, settings: Any) -> R:
        """The artifacts that the function returns for settings; its error as an `InputError`."""
        values = {name: getattr(settings, name) for name in self.setting_names}
        try:
            return self.function(**values)
        except Exception as error:  # noqa: BLE001 - any may come from a user's file
            _refuse(error, self.function.__code__.co_filename)

    def _with(self, settings: Any, values: Mapping[str, Any], where: str) -> Any:
        hints = typing.get_type_hints(type(settings), include_extras=True)
        for name, value in values.items():
            if name not in hints:
                raise InputError(f"{where}: {unknown('setting', name, self.setting_names)}")
            _check_type(value, hints[name], f"{where}: {name}")
        return dataclasses.replace(settings, **values)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {', '.join(self.presets)}>"


def nodes(wanted: Any) -> list[Node]:
    return [as_node(each) for each in (wanted if isinstance(wanted, tuple) else (wanted,))]


def load_experiment(reference: str, function: str = "") -> Declaration[Any]:
    """The experiment of a Python file, imported as a module; `FILE:NAME` when it has several.

    `function` is the qualified name of the experiment's function, instead of a variable's name.
    """
    path, _, name = reference.partition(":")
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise InputError(f"{path}: expected the Python file of an experiment, found none")
    module = _import(path)
    there = {key: v for key, v in vars(module).items() if isinstance(v, Declaration)}
    own = {k: e for k, e in there.items() if e.function.__module__ == module.__name__} or there
    if function:
        own = {k: e for k, e in own.items() if e.function.__qualname__ == function}
    if name:
        if name not in there:
            raise InputError(f"{path}: {unknown('experiment', name, there or ['none'])}")
        return there[name]
    if not own:
        raise InputError(f"{path}: expected a variable with an Experiment(...), found none")
    if len({id(experiment) for experiment in own.values()}) > 1:
        raise InputError(f"{path} has several experiments; name one: {path}:{next(iter(own))}")
    return next(iter(own.values()))


def _import(path: str) -> Any:
    name, folder = module_names.importable(path)
    if folder not in sys.path:
        sys.path.append(folder)
    if not Path(folder).is_relative_to(module_names.HOME):
        module_names.outside.add(name)
    loading.append(path)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any may come from there
        _refuse(error, path)
    finally:
        loading.pop()
    module_names.add_outside(folder)
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != Path(path).resolve():
        raise InputError(
            f"{path}: its name {name!r} is that of another module, {file or 'built in'}; rename it"
        )
    return module


def _refuse(error: BaseException, file: str) -> NoReturn:
    """Raise an error from a user's file as an `InputError` of one line with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if os.path.realpath(f.filename) == os.path.realpath(file)]
    theirs = [f for f in frames if "<frozen" not in f.filename]  # importlib's frames are frozen
    line = (own or theirs or frames)[-1]
    where = f"{os.path.relpath(line.filename)}:{line.lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        where, text = f"{os.path.relpath(error.filename)}:{error.lineno}", str(error.msg)
    else:
        text = f"{error}{module_names.hidden(error)}"
    kind = "" if isinstance(error, PonenteError) else f"{type(error).__name__}: "
    raise InputError(f"{where}: {kind}{text}") from error


def _settings_class(function: Callable[..., Any]) -> type:
    hints = typing.get_type_hints(function, include_extras=True)
    fields = []
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"{function.__name__}({name})"
        default = parameter.default
        if default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(f"{where}: expected a setting with a default, {name}=...")
        plain = isinstance(default, bool | int | float | str) or dataclasses.is_dataclass(default)
        if name not in hints and not plain:
            raise InputError(f"{where}: expected an annotation; {default!r} has no clear type")
        hint = hints.get(name, type(default))
        _check_type(default, hint, where)
        try:
            hash(default)
        except TypeError:
            raise InputError(
                f"{where}: {default!r} is mutable; use a tuple or a frozen dataclass"
            ) from None
        fields.append((name, hint, dataclasses.field(default=default)))
    about = {"__doc__": function.__doc__, "__module__": function.__module__}
    return dataclasses.make_dataclass(
        function.__name__, fields, frozen=True, kw_only=True, namespace=about
    )


def _check_type(value: Any, hint: Any, where: str) -> None:
    import typeguard  # imported here because it is slow to import

    try:
        typeguard.check_type(
            value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError:
        wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise InputError(
            f"{where}: expected {wanted}, got {value!r} of type {type(value).__name__}"
        ) from None
