"""One attempt at one step: the only place where the commit protocol is written down.

    published? -> lease -> published? -> attempt directory -> the body -> manifest -> release

The body writes under its attempt; the manifest is created if absent; so a writer that was paused
and wakes up after a takeover can neither touch nor replace what was published. Runs in whatever
process the executor chose, and turns every error into an `Outcome`, so that nothing but data
travels back.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import lease, manifest, provenance, storage
from pipeline.artifact import Artifact
from pipeline.errors import DamagedOutput, InputError, PonenteError, WorkerLost
from pipeline.logs import capture
from pipeline.run import Emit, StepRun, Workers
from pipeline.step import StepFunction

logger = logging.getLogger("ponente")


@dataclass(frozen=True)
class Request:
    """Everything a process needs to execute a step; picklable."""

    step: StepFunction[..., Any]
    label: str
    key: str
    root: str
    inputs: Mapping[str, tuple[str, str]]  # argument -> (step directory, key)
    arguments: Mapping[str, Any]  # configuration and runtime arguments
    canonical_config: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: "published", "reused" (somebody else published) or "failed".
        cause: one line, when failed.
        log: URL of the attempt's full log.
        transient: whether trying again could help.
    """

    status: str
    seconds: float = 0.0
    cause: str = ""
    log: str = ""
    transient: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


def execute(request: Request, emit: Emit, workers: Workers, *, redirect: bool = True) -> Outcome:
    """Bring one step's output into being, or say why not.

    Args:
        request: what to execute.
        emit: takes events, each stamped with the step.
        workers: what the body's fan-out and gangs run on.
        redirect: send this process's stdout and stderr to the attempt's log meanwhile.
    """

    def tell(event: dict[str, Any]) -> None:
        emit({**event, "step": request.label, "key": request.key})

    def published() -> bool:
        return manifest.load_verified(request.root, request.key) is not None

    try:
        held = lease.acquire(request.root, published=published, waiting=_once(tell))
    except (PonenteError, OSError) as error:
        return Outcome("failed", cause=_one_line(error), transient=isinstance(error, OSError))
    if held is None:
        return Outcome("reused")
    try:
        return _attempt(request, held.number, tell, workers, redirect)
    finally:
        held.release()


def _once(tell: Emit) -> Any:
    told: list[int] = []

    def waiting(holder: dict[str, Any]) -> None:
        if not told:
            told.append(1)
            host = str(holder.get("host", "?")).split(" ")[0]
            tell({"event": "waiting", "holder": f"process {holder.get('pid')} on {host}"})

    return waiting


def _attempt(
    request: Request, number: int, tell: Emit, workers: Workers, redirect: bool
) -> Outcome:
    attempt = f"{number:06d}-{uuid.uuid4().hex[:8]}"
    run = StepRun(request.root, request.label, attempt, tell, workers)
    log = storage.join(run.directory, "log.txt")
    tell({"event": "started", "attempt": attempt, "log": log})
    started, clock = time.time(), time.monotonic()
    with capture(log, redirect=redirect):
        try:
            result = request.step.function(run, **_open_inputs(request), **request.arguments)
            _publish(request, run, dict(result or {}), started, time.monotonic() - clock)
        except Exception as error:  # noqa: BLE001 - a body may raise anything; it becomes data
            logger.error("%s", traceback.format_exc())
            return Outcome(
                "failed",
                time.monotonic() - clock,
                _one_line(error),
                log,
                transient=isinstance(error, OSError | WorkerLost)
                and not isinstance(error, FileNotFoundError),
            )
    return Outcome("published", time.monotonic() - clock, log=log, details=dict(result or {}))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, InputError | DamagedOutput | WorkerLost):
        return text
    return f"{type(error).__name__}: {text}"


def _open_inputs(request: Request) -> dict[str, Artifact | None]:
    opened: dict[str, Artifact | None] = dict.fromkeys(request.step.input_types)
    for name, (path, key) in request.inputs.items():
        found = manifest.load_verified(path, key)
        if found is None:
            raise DamagedOutput(f"{path}: input {name!r} of {request.label} is gone; run again")
        opened[name] = request.step.input_types[name](path, found)
    return opened


def _publish(
    request: Request, run: StepRun, result: dict[str, Any], started: float, seconds: float
) -> None:
    record = manifest.Manifest(
        key=request.key,
        step=request.step.name,
        version=request.step.version,
        label=request.label,
        config=dict(request.canonical_config),
        inputs={
            name: {"key": key, "directory": os.path.basename(path), "digest": _digest(path)}
            for name, (path, key) in request.inputs.items()
        },
        shards=tuple(run.ledger.finished().values()),
        result=result,
        attempt=run.attempt,
        started=started,
        seconds=seconds,
        provenance=provenance.collect(request.step.function),
    )
    url = storage.join(request.root, manifest.NAME)
    if not storage.create(url, record.to_bytes()):
        manifest.load_verified(request.root, request.key)
        logger.warning("another attempt published first; this one's output is discarded")
    _discard_unreferenced(request.root)


def _digest(path: str) -> str:
    found = manifest.load(path)
    return found.digest if found else ""


def _discard_unreferenced(root: str) -> None:
    """Delete the data of attempts nothing published refers to; their logs stay."""
    published = manifest.load(root)
    if published is None:
        return
    kept = {shard.root for shard in published.shards}
    attempts = storage.join(root, "attempts")
    for attempt in storage.list_names(attempts):
        if not any(f"attempts/{attempt}/" in f"{path}/" for path in kept):
            for name in storage.list_names(storage.join(attempts, attempt)):
                if name != "log.txt":
                    storage.delete_tree(storage.join(attempts, attempt, name))
