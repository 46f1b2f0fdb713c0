"""The verbs of every experiment, and the `ponente` command.

    python experiments/run_200m.py                      run it
    python experiments/run_200m.py plan --smoke         what would run under the preset, and why
    ponente show experiments/run_200m.py train          one step's manifest

Every field of the experiment's settings is a flag by its dotted name (`--train.steps 100`).
"""

from __future__ import annotations

import gc
import importlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeVar

from pipeline.cli import options, verbs
from pipeline.cli.context import file_among, of_command, say
from pipeline.cli.streams import survive_closed_streams
from pipeline.errors import Cancelled, PonenteError, UsageError
from pipeline.graph.declaration import Declaration, load_experiment
from pipeline.identity.secret_text import refuse_secrets

T = TypeVar("T")
More = Mapping[str, tuple[str, str]]
"""Verb -> (help, `module:function` of its arguments, imported when it is called)."""
_COMPLETION = "completion"
_JOIN = {
    "join": ("make this machine a host of a cluster; needs no file", "pipeline.cli.launch:join")
}


def main(experiment: Declaration[Any], arguments: list[str]) -> NoReturn:
    clock = time.perf_counter()

    def work() -> int:
        named = arguments and not arguments[0].startswith("-")
        verb, *rest = arguments if named else ["run", *arguments]
        options.check_verb(verb)
        return _run_verb(verb, rest, experiment, clock, f"{os.path.basename(sys.argv[0])} {verb}")

    sys.exit(exit_with_error(work))


@survive_closed_streams(lasting=False)
def exit_with_error(work: Callable[[], T]) -> T:
    """What `work` returns; if it raises, print one line and exit with a status."""
    try:
        return work()
    except Cancelled as stopped:
        say(f"{stopped}; run it again to resume", error=True)
        sys.exit(130)
    except PonenteError as error:
        say(f"error: {error}", error=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        # stdout was closed (`| head`); exit quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        say(f"error: {error}", error=True)
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; finished steps are kept, run it again to resume", error=True)
        sys.exit(130)


def command(more: More | None = None) -> NoReturn:
    gc.freeze()  # what was imported lives as long as the process: it is not looked through again
    sys.exit(exit_with_error(lambda: _command(sys.argv[1:], _JOIN | dict(more or {}))))


def _command(arguments: list[str], more: More) -> int:
    clock = time.perf_counter()
    verb, *rest = arguments or [""]
    if verb in ("-h", "--help", ""):
        _usage(more, error=not verb)
        return 0 if verb else 2
    if verb == "--version":
        import importlib.metadata

        say(f"ponente {importlib.metadata.version('ponente')}")
        return 0
    if verb in more:
        try:
            return resolve_name(more[verb][1])(rest)
        except KeyboardInterrupt:
            return 130  # the engine's message is about steps to resume, which these do not have
    if verb == _COMPLETION:
        return _complete(rest, {name: about[0] for name, about in more.items()})
    options.check_verb(verb, (*more, _COMPLETION))
    refuse_secrets(rest)
    if verb in verbs.FREE:
        return _run_verb(verb, rest, None, clock, f"ponente {verb}")
    if not (files := file_among(rest)):
        if {"-h", "--help"} & set(rest):
            options.parser(verb, program=f"ponente {verb} FILE").print_help()
            return 0
        found = rest[0] if rest else "nothing"
        raise UsageError(f"ponente {verb}: expected an experiment's Python file, found {found}")
    rest.remove(files[0])
    return _run_verb(
        verb, rest, load_experiment(files[0]), clock, f"ponente {verb} {shlex.quote(files[0])}"
    )


def _usage(more: More, *, error: bool) -> None:
    say("usage: ponente VERB EXPERIMENT.py[:NAME] [STEP ...] [flags]", error=error)
    for name, about in verbs.VERBS.items():
        say(f"  {name:<11}{about.help}", error=error)
    for name, (help, _) in more.items():
        say(f"  {name:<11}{help}", error=error)
    say(f"  {_COMPLETION:<11}print completions for bash, zsh or tcsh", error=error)
    say("ponente VERB --help lists the flags of a verb; --version", error=error)
    say(verbs.EXIT_CODES, error=error)


def _complete(shells: list[str], more: dict[str, str]) -> int:
    if len(shells) != 1 or shells[0] not in ("bash", "zsh", "tcsh"):
        found = " ".join(shells) or "nothing"
        raise UsageError(f"ponente {_COMPLETION}: expected bash, zsh or tcsh, found {found}")
    import shtab

    say(shtab.complete(options.every_verb(more), shells[0]))
    return 0


def _run_verb(
    verb: str, arguments: list[str], experiment: Declaration[Any] | None, clock: float, program: str
) -> int:
    refuse_secrets(arguments)
    experiment = None if verb in verbs.FREE else experiment
    parsed = options.parse(verb, arguments, experiment, program)
    # Only the modules that this verb needs are imported.
    module = importlib.import_module(f"pipeline.cli.{_MODULES[verb]}")
    return getattr(module, verb)(of_command(experiment, parsed, clock))


_MODULES = {
    "run": "run",
    "launch": "launch",
    **dict.fromkeys(["stop", "logs"], "watch"),
    **dict.fromkeys(["plan", "status", "show"], "inspection"),
    "spending": "spending",
    **dict.fromkeys(["verify", "gc", "adopt", "unlock", "doctor"], "maintenance"),
}
