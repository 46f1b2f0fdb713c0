"""Verbs and flags: argparse parses the engine's flags, tyro the experiment's settings."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from pipeline.cli.verbs import EVERY, EXIT_CODES, FLAGS, FREE, SHORT, SPELLED, VERBS, names, seconds
from pipeline.errors import NEAR, InputError, UsageError, unknown
from pipeline.execute.spending import Budget
from pipeline.graph.capacity import Capacity
from pipeline.graph.declaration import FULL, Declaration

_NARROW = 20  # columns


class UsageParser(argparse.ArgumentParser):
    """A parser whose errors raise `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def verb_parser(verb: str, about: str | None) -> UsageParser:
    """The parser of a verb of a step library, which adds its arguments."""
    return UsageParser(
        prog=f"ponente {verb}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser(
    verb: str, experiment: Declaration[Any] | None = None, program: str = ""
) -> argparse.ArgumentParser:
    made = UsageParser(
        prog=program or f"ponente {verb}",
        add_help=False,
        allow_abbrev=False,
        description=VERBS[verb].help,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for spelled, name in SPELLED.items():
        if name in _flags_of(verb):
            words = [SHORT[name]] if name in SHORT else []
            made.add_argument(*words, spelled, dest=name, **{**FLAGS, **VERBS[verb].own}[name])
    if experiment is not None and verb not in FREE:
        settings = " ".join(f"--{name.replace('_', '-')}" for name in experiment.setting_names)
        head = f"settings of {experiment.name} (--help-settings explains them):"
        made.epilog = f"{head}\n  {settings}\n\n{EXIT_CODES}"
    for preset in experiment.presets if experiment is not None and verb not in FREE else ():
        help = f"the same as --preset {preset}"
        spelled = f"--{preset.replace('_', '-')}"
        made.add_argument(spelled, dest="preset", action="store_const", const=preset, help=help)
    words = VERBS[verb].words
    # argparse formats the usage with %.
    made.usage = " ".join(f"{made.prog} {words} [flags]".split()).replace("%", "%%")
    return made


def _flags_of(verb: str) -> set[str]:
    own = {*VERBS[verb].flags, *EVERY}
    return own - {"preset", "shared", "help_settings"} if verb in FREE else own


def check_verb(verb: str, more: tuple[str, ...] = ()) -> None:
    """Raise `UsageError` for a verb that does not exist, naming the nearest."""
    if verb not in VERBS:
        raise UsageError(f"{unknown('verb', verb, [*VERBS, *more])}; see ponente --help")


def defaults(verb: str) -> argparse.Namespace:
    return parser(verb).parse_args([])


def of_python(verb: str, name: str, value: Any) -> Any:
    """The value of a verb's flag that was given as an argument in Python.

    Text is read as on the command line; one path, or several in any collection, serve as text.
    """
    flag = VERBS[verb].own.get(name, FLAGS[name])
    read, several = flag.get("type"), flag.get("type") is names
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif several and not isinstance(value, str):
        return tuple(os.fspath(one) for one in value)
    choices = flag.get("choices", (value,))
    if value is not None and value not in choices:
        raise InputError(unknown(name, value, list(choices)))
    try:
        number = isinstance(value, int | float) and 0 <= value < float("inf")
        odd = isinstance(value, bool) or not (number or isinstance(value, str | None))
        if read is seconds and odd:
            raise ValueError("expected seconds, at least 0, or a time such as '90s'")
        text = isinstance(value, str) or (
            number and not odd and read in (Budget.parse, Capacity.parse)
        )
        return read(str(value)) if read is not None and text else value
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise InputError(f"{name}={value!r}: {error}") from None


def parse(
    verb: str, arguments: list[str], experiment: Declaration[Any] | None, program: str
) -> tuple[argparse.Namespace, list[str], Any]:
    """(engine flags, words, settings), parsed from the arguments after a verb."""
    made = parser(verb, experiment, program)
    options, rest = made.parse_known_args(arguments)
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, overrides = rest[:count], rest[count:]
    if experiment is not None:
        overrides, behind = _apart(overrides, dotted(experiment.presets[FULL], several=True))
        words += behind
    options.overrides = overrides
    if options.help:
        made.print_help()
        raise SystemExit(0)
    if words and not VERBS[verb].words:
        raise UsageError(f"{made.prog}: takes no {words[0]!r}; see {made.prog} --help")
    if experiment is None:
        _check_flags(verb, made.prog, overrides, [])
        return options, words, None
    if options.preset is not None and options.preset not in experiment.presets:
        raise UsageError(unknown("preset", options.preset, experiment.presets))
    preset = experiment.presets[options.preset or FULL]
    _check_flags(verb, made.prog, overrides, dotted(preset), experiment.presets)
    if options.help_settings:
        sys.stdout.write(_help_settings(preset, made.prog).rstrip() + "\n")
        raise SystemExit(0)
    return options, words, override(preset, overrides, made.prog)


def dotted(settings: Any, before: str = "", *, several: bool = False) -> list[str]:
    """The flags of settings, or of those with `several` values; nested ones by dotted name."""
    found = []
    for field in dataclasses.fields(settings):
        name, value = before + field.name.replace("_", "-"), getattr(settings, field.name)
        if not several or "tuple" in str(field.type):
            found.append(f"--{name}")
        if dataclasses.is_dataclass(value):
            found += dotted(value, f"{name}.", several=several)
    return found


def _apart(arguments: list[str], several: list[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the words behind the one value that a flag takes."""
    flags, words, left = [], [], math.inf
    for argument in arguments:
        if argument.startswith("--"):
            name, given, _ = argument.replace("_", "-").partition("=")
            many = any(name == flag or name.startswith(f"{flag}.") for flag in several)
            left = 0 if given else math.inf if many else 1
        elif left:
            left -= 1
        else:
            words.append(argument)
            continue
        flags.append(argument)
    return flags, words


def _check_flags(
    verb: str, prog: str, overrides: list[str], settings: list[str], presets: Iterable[str] = ()
) -> None:
    for word in overrides:
        name = word.partition("=")[0].replace("_", "-")
        if not word.startswith("--") or name in settings:
            continue
        if name in SPELLED:
            owners = [v for v in VERBS if SPELLED[name] in _flags_of(v)]
            raise UsageError(f"{prog}: no flag {name}; {', '.join(owners)} has it")
        if name == "--print" and verb == "launch":
            raise UsageError(f"{prog}: printing is the default; --go runs the commands")
        known = [s for s, n in SPELLED.items() if n in _flags_of(verb)]
        known += [f"--{preset.replace('_', '-')}" for preset in presets]
        hint = _hint(name, [*known, *settings])
        raise UsageError(f"{prog}: no flag {name!r}{hint}; see {prog} --help")


def _hint(name: str, known: list[str]) -> str:
    """Which flag a wrong one may mean, or which there are at its place; empty for too many."""
    import difflib  # imported here because it would add 5 % to the engine's import time

    above, _, last = name.removeprefix("--").rpartition(".")
    places = [(flag.removeprefix("--").rpartition("."), flag) for flag in known]
    # Only the last parts are compared: what all have in front would make any two alike.
    beside = {end: flag for (place, _, end), flag in places if place == above}
    near = [beside[end] for end in difflib.get_close_matches(last, beside, 1, NEAR)]
    for (_, _, end), flag in places:
        initials = "".join(word[:1] for word in end.split("-"))
        near += [flag] if last in (end, initials) else []
    ends = {end: flag for (_, _, end), flag in places if not above}
    near += [ends[end] for end in difflib.get_close_matches(last, ends, 1, NEAR)]
    if near:
        return f"; did you mean {near[0]}?"
    there = f"; expected one of {', '.join(beside.values())}"
    return there if above and beside and len(there) < 400 else ""


def override(preset: Any, overrides: list[str], prog: str) -> Any:
    """The preset with fields overridden by dotted flags."""
    if not overrides:
        return preset
    # tyro is slow to import, and only overrides need it.
    import tyro

    if shutil.get_terminal_size().columns < _NARROW:
        os.environ["COLUMNS"] = str(_NARROW)  # tyro's help never ends on fewer than 8
    return tyro.cli(
        type(preset),
        prog=prog,
        default=preset,
        args=overrides,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )


def _help_settings(preset: Any, prog: str) -> str:
    """Every setting with its value, without those of the items of a tuple, which have numbers."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        override(preset, ["--help"], prog)
    groups = re.split(r"^(?=\W*[\w.-]* ?options\W*$)", text.getvalue(), flags=re.MULTILINE)
    return "".join(group for group in groups if not re.match(r"\W*[\w.-]*\.\d", group))


def every_verb(more: dict[str, str]) -> argparse.ArgumentParser:
    """One parser with a subparser for each verb, for shell completion."""
    import shtab

    made = argparse.ArgumentParser("ponente")
    made.add_argument("--version", action="store_true")
    verbs = made.add_subparsers()
    for verb, about in VERBS.items():
        own = verbs.add_parser(verb, help=about.help, parents=[parser(verb)], add_help=False)
        if verb not in FREE:
            # argparse has no type for what a shell completes; shtab reads this attribute.
            own.add_argument("file").complete = shtab.FILE  # type: ignore[attr-defined]
    for verb, help in more.items():
        verbs.add_parser(verb, help=help)
    return made
