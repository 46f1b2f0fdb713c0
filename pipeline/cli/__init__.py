"""The verbs every experiment file accepts, and the `ponente` command that passes them on.

    python experiments/run_200m.py                      run it
    python experiments/run_200m.py plan --preset smoke  what would run, and why
    ponente show experiments/run_200m.py train          one step's manifest

Flags of the engine come first in the help; every field of the experiment's settings is a flag by
its dotted name (`--train.steps 100`).
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from pipeline.cli import options
from pipeline.cli.context import Context, say
from pipeline.errors import Cancelled, InputError, PonenteError
from pipeline.graph.node import as_node
from pipeline.store.outputs import Store

S = TypeVar("S")


def main(
    build: Callable[[S], Any], presets: Mapping[str, S], arguments: list[str] | None = None
) -> None:
    """Run the command line of an experiment; exits the process with a status.

    Args:
        build: settings -> what the experiment wants: one step's output or a tuple of them.
        presets: settings by name; the first is the default.
        arguments: instead of the process's own.
    """
    if options.collected is not None:
        options.collected += [node for s in presets.values() for node in _targets(build(s))]
        return
    _exit(lambda: _main(build, presets, sys.argv[1:] if arguments is None else arguments))


def _exit(verb: Callable[[], int]) -> NoReturn:
    """End the process with the verb's status, or with what its error deserves."""
    try:
        sys.exit(verb())
    except Cancelled as stopped:
        say(f"{stopped}; run it again to go on", error=True)
        sys.exit(130)
    except PonenteError as error:
        say(f"error: {error}", error=True)
        sys.exit(1)
    except BrokenPipeError:
        # Whoever read our lines (`| head`) has seen enough; nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; finished steps are kept, run it again to go on", error=True)
        sys.exit(130)


def command(more: Mapping[str, Callable[[list[str]], int]] | None = None) -> None:
    """Entry point of `ponente VERB FILE ...`; `ponente doctor` needs no file.

    Args:
        more: verbs of other packages, which need no experiment file either: by name, the function
            that takes the arguments after the verb and returns the exit status.
    """
    more = more or {}
    verb, *rest = sys.argv[1:] or [""]
    if verb in more:
        _exit(lambda: more[verb](rest))
    if verb == "doctor" and (not rest or rest[0].startswith("-")):
        main(lambda settings: (), {"": None}, ["doctor", *rest])
    if verb not in options.VERBS or not rest:
        asked = verb in ("-h", "--help")
        say("usage: ponente VERB EXPERIMENT.py [STEP ...] [flags]", error=not asked)
        for name, what in options.VERBS.items():
            say(f"  {name:<9} {what}", error=not asked)
        for name in more:
            say(f"  {name:<9} see ponente {name} --help", error=not asked)
        sys.exit(0 if asked else 2)
    path, *words = rest
    if not (path.endswith(".py") and os.path.isfile(path)):
        say(f"error: {path}: expected the Python file of an experiment, found none", error=True)
        sys.exit(1)
    sys.argv = [path, verb, *words]
    runpy.run_path(path, run_name="__main__")


def _targets(wanted: Any) -> list[Any]:
    return [as_node(t) for t in (wanted if isinstance(wanted, tuple) else (wanted,))]


def _main(build: Callable[[S], Any], presets: Mapping[str, S], arguments: list[str]) -> int:
    clock = time.perf_counter()
    verb, words, flags = options.split(arguments)
    parser = options.parser(presets)
    chosen, overrides = parser.parse_known_args(flags)
    if chosen.help:
        parser.print_help()
        overrides = ["--help"]
    settings = options.override(presets[chosen.preset], overrides)
    context = Context(
        targets=_targets(build(settings)),
        # Every preset is kept by `gc`, not only the one that was named.
        all_targets=lambda: [n for s in (settings, *presets.values()) for n in _targets(build(s))],
        store=Store(chosen.prefix, chosen.shared),
        settings=settings,
        options=chosen,
        words=words,
        clock=clock,
    )
    return _verb(verb)(context)


def _verb(name: str) -> Callable[[Context], int]:
    """The function of a verb; what it needs is imported only then."""
    if name == "run":
        from pipeline.cli.run import run

        return run
    from pipeline.cli import inspection, logs, maintenance

    verbs: dict[str, Callable[[Context], int]] = {
        "plan": inspection.plan,
        "explain": inspection.explain,
        "status": inspection.status,
        "graph": inspection.graph,
        "show": inspection.show,
        "logs": logs.logs,
        "verify": maintenance.verify,
        "gc": maintenance.gc,
        "adopt": maintenance.adopt,
        "unlock": maintenance.unlock,
        "doctor": maintenance.doctor,
    }
    if name not in verbs:
        raise InputError(f"expected one of {', '.join(options.VERBS)}, got {name!r}")
    return verbs[name]


__all__ = ["command", "main"]
