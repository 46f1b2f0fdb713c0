"""The verbs every experiment file accepts, and the `ponente` command that passes them on.

    python experiments/run_200m.py                      run it
    python experiments/run_200m.py plan --preset smoke  what would run, and why
    ponente show experiments/run_200m.py train          one step's manifest

Flags of the engine come first in the help; every field of the experiment's settings is a flag by
its dotted name (`--train.steps 100`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import runpy
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipeline import storage
from pipeline.display import choose
from pipeline.errors import InputError, PonenteError
from pipeline.events import EventLog
from pipeline.executor import Backend, Execution, InlineBackend
from pipeline.plan import Planned, plan
from pipeline.step import Node, as_node, topological

S = TypeVar("S")
VERBS = ("run", "plan", "graph", "show", "logs")


def main(
    build: Callable[[S], Any], presets: Mapping[str, S], arguments: list[str] | None = None
) -> None:
    """Run the command line of an experiment; exits the process with a status.

    Args:
        build: settings -> what the experiment wants: one step's output or a tuple of them.
        presets: settings by name; the first is the default.
        arguments: instead of the process's own.
    """
    try:
        sys.exit(_main(build, presets, sys.argv[1:] if arguments is None else arguments))
    except PonenteError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command line's own output
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; finished steps are kept, run it again to go on", file=sys.stderr)  # noqa: T201
        sys.exit(130)


def command() -> None:
    """Entry point of `ponente VERB FILE ...`."""
    if len(sys.argv) < 3 or sys.argv[1] not in VERBS:
        print(f"usage: ponente {{{','.join(VERBS)}}} EXPERIMENT.py [flags]", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    verb, path, *rest = sys.argv[1:]
    sys.argv = [path, verb, *rest]
    runpy.run_path(path, run_name="__main__")


def _parser(presets: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        usage=f"%(prog)s [{'|'.join(VERBS)}] [STEP (show, logs)] [flags]",
    )
    parser.add_argument("--preset", choices=list(presets), default=next(iter(presets)))
    parser.add_argument(
        "--prefix",
        default=os.environ.get("PONENTE_PREFIX", "./runs"),
        help="store: a path or gs://bucket/dir",
    )
    parser.add_argument("--executor", choices=("ray", "inline"), default="ray")
    parser.add_argument(
        "--cluster", default=os.environ.get("RAY_ADDRESS"), help="address of a Ray cluster to join"
    )
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _main(build: Callable[[S], Any], presets: Mapping[str, S], arguments: list[str]) -> int:
    clock = time.perf_counter()
    verb, step, flags = _split(arguments)
    parser = _parser(presets)
    options, overrides = parser.parse_known_args(flags)
    if options.help:
        parser.print_help()
        overrides = ["--help"]
    settings = _override(presets[options.preset], overrides)
    wanted = build(settings)
    targets = [as_node(t) for t in (wanted if isinstance(wanted, tuple) else (wanted,))]
    prefix = storage.normalise(options.prefix)
    if verb == "run":
        return _run(targets, prefix, settings, options, clock)
    verbs = {"plan": _plan, "graph": _graph, "show": _show, "logs": _logs}
    return verbs[verb](targets, prefix, step)


def _split(arguments: list[str]) -> tuple[str, str | None, list[str]]:
    """(verb, step, flags): words before the first flag are the verb and the step it is about."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    verb = words[0] if words else "run"
    if verb not in VERBS or len(words) > (2 if verb in ("show", "logs") else 1):
        raise InputError(f"expected one of {', '.join(VERBS)}, got {' '.join(words)!r}")
    return verb, words[1] if len(words) > 1 else None, arguments[len(words) :]


def _override(preset: S, overrides: list[str]) -> S:
    if not overrides:
        return preset
    # tyro is slow to import for its size and only flags need it.
    import tyro

    return tyro.cli(
        type(preset), default=preset, args=overrides, config=(tyro.conf.FlagConversionOff,)
    )


def _say(text: str = "") -> None:
    print(text, flush=True)  # noqa: T201 - the command line's own output


def _run(targets: list[Node], prefix: str, settings: Any, options: Any, clock: float) -> int:
    _say_settings(settings, options)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    display = choose(topological(targets))
    log = EventLog(prefix, run_id, [display])
    log.emit(
        {"event": "run_started", "command": sys.argv, "settings": dataclasses.asdict(settings)}
    )
    backend: Backend | None = None
    execution = Execution(
        targets,
        prefix,
        log,
        retry_command=shlex.join([os.path.basename(sys.executable), *sys.argv]),
    )
    try:
        needed = execution.look()
        looked = time.perf_counter() - clock
        if needed:
            backend = _backend(options, log)
            execution.run(backend, needed)
    finally:
        if backend is not None:
            backend.close()
        display.close()
    log.emit({"event": "run_finished", "executed": [node.label for node in execution.executed]})
    total = len(execution.published)
    if needed:
        _say(f"{len(execution.executed)} steps executed, {total - len(execution.executed)} reused")
    else:
        _say(f"all {total} steps up to date; looking took {looked:.2f} s")
    for node in targets:
        for line in execution.published[node.key].result.get("headline", ()):
            _say(line)
    return 0


def _backend(options: Any, log: EventLog) -> Backend:
    if options.executor == "inline":
        return InlineBackend(log)
    from pipeline.ray_backend import RayBackend

    _say("starting Ray" if options.cluster is None else f"joining Ray at {options.cluster}")
    return RayBackend(options.cluster)


def _say_settings(settings: Any, options: Any) -> None:
    _say(f"{os.path.basename(sys.argv[0])}  preset {options.preset}  store {options.prefix}")
    for field in dataclasses.fields(settings):
        _say(f"  {field.name} = {getattr(settings, field.name)}")


def _plan(targets: list[Node], prefix: str, _: str | None) -> int:
    entries = plan(targets, prefix)
    _say(f"store {prefix}")
    for entry in entries:
        action = "run" if entry.needed else "reuse" if entry.status == "hit" else "skip"
        _say(f"{action:<6} {entry.node.label:<16} {entry.status:<8} {entry.reason}")
    for warning in (w for entry in entries for w in entry.warnings):
        _say(f"warning: {warning}")
    _say(f"{sum(e.needed for e in entries)} of {len(entries)} steps would run")
    return 0


def _graph(targets: list[Node], prefix: str, _: str | None) -> int:
    for node in topological(targets):
        inputs = ", ".join(f"{name}={child.label}" for name, child in node.inputs.items())
        path = storage.join(prefix, node.directory)
        _say(f"{node.label}({inputs}) -> {node.step.output.__name__}  {path}")
    return 0


def _pick(targets: list[Node], prefix: str, step: str | None) -> Planned:
    entries = plan(targets, prefix)
    for entry in entries:
        if entry.node.label == step:
            return entry
    labels = ", ".join(entry.node.label for entry in entries)
    raise InputError(f"which step? expected one of {labels}; got {step!r}")


def _show(targets: list[Node], prefix: str, step: str | None) -> int:
    entry = _pick(targets, prefix, step)
    if entry.published is None:
        raise InputError(f"{entry.node.label}: nothing published at {entry.path} ({entry.status})")
    tree = json.loads(entry.published.to_bytes())
    for shard in tree["shards"]:
        shard["files"] = f"{len(shard['files'])} files"
    _say(json.dumps({"path": entry.path, **tree}, indent=1))
    return 0


def _logs(targets: list[Node], prefix: str, step: str | None) -> int:
    entry = _pick(targets, prefix, step)
    attempts = storage.join(entry.path, "attempts")
    names = storage.list_names(attempts)
    logs = [storage.join(attempts, name, "log.txt") for name in names]
    logs = [url for url in logs if storage.exists(url)]
    if not logs:
        raise InputError(f"{entry.node.label}: no attempt was logged under {entry.path}")
    _say(f"==> {logs[-1]}")
    _say(storage.read_bytes(logs[-1]).decode(errors="replace"))
    return 0
