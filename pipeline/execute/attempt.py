"""One attempt at one step: the implementation of the commit protocol.

    published? -> lease -> published? -> attempt directory -> the body -> manifest -> release

The body writes under its attempt and declares the shards of its output; the manifest lists exactly
those, after each was found in the ledger and on disk. The manifest is created if absent; so a
writer that was paused and continues after a takeover cannot change the published output. Only a
requested rebuild replaces a manifest, by a compare-and-swap against the one it was to replace, and
keeps the old one in `retired/`. An attempt runs in any process that the executor chose, and returns
every error as an `Outcome`, so that no exception has to be pickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import traceback
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline import events
from pipeline.errors import (
    Cancelled,
    CorruptOutput,
    InputError,
    PonenteError,
    Preempted,
    ResourcesUnavailable,
    StoreUnavailable,
    WorkerLost,
    one_line,
)
from pipeline.events import Emit, Event
from pipeline.execute.logs import NAME as LOG
from pipeline.execute.logs import capture
from pipeline.execute.reference import refer_to
from pipeline.execute.request import Ending, Outcome, Request
from pipeline.graph.artifact import Live, argument_of
from pipeline.graph.step_context import Reference, StepContext, Workers
from pipeline.identity import digests, provenance
from pipeline.plan.listings import check_unchanged
from pipeline.store import lease, left_overs, manifest, outputs, storage
from pipeline.store.builds import named
from pipeline.store.copies import bring_home
from pipeline.store.decode import plain_result
from pipeline.store.manifest import FAILURE, RETIRED, Manifest, load_verified
from pipeline.store.parallel import concurrently
from pipeline.store.shards import Shard, keep_shards, wrong_sizes

logger = logging.getLogger("ponente")


def execute(request: Request, emit: Emit, workers: Workers, *, redirect: bool = True) -> Outcome:
    """Execute one step; errors are returned as an `Outcome`, never raised.

    `redirect` sends this process's stdout and stderr to the attempt's log while the step runs.
    """

    def tell(event: Event) -> None:
        emit(msgspec.structs.replace(event, step=request.label, key=request.key))

    told: set[str] = set()

    def waiting(holder: dict[str, Any]) -> None:
        owner = lease.owner_text(holder)
        if workers.stopping:
            raise Cancelled(f"was waiting for {owner}")
        if owner not in told:
            told.add(owner)
            tell(events.Waiting(owner))

    held: lease.Lease | None = None
    try:
        root = request.root
        reads = {manifest.make_ref(root, x.path): x.attempt for x in request.inputs.values()}
        held = lease.acquire(root, published=request.published, waiting=waiting, reads=reads)
        if held is None:
            return Outcome(Ending.REUSED)
        lease.wait_for_collector(root.rpartition("/")[0], waiting)
        return _attempt(request, held, tell, workers, redirect)
    except Cancelled as error:
        return Outcome(Ending.STOPPED, cause=one_line(error))
    except (PonenteError, OSError) as error:
        lost = isinstance(error, OSError)
        return Outcome(Ending.LOST if lost else Ending.FAILED, cause=one_line(error))
    finally:
        if held is not None:
            held.release()


def _attempt(
    request: Request, held: lease.Lease, tell: Emit, workers: Workers, redirect: bool
) -> Outcome:
    attempt = f"{held.number:06d}-{uuid.uuid4().hex[:8]}"
    run = StepContext(request.ledger, request.label, attempt, tell, workers)
    external = (request.label, request.step, request.arguments, request.listings)
    log = storage.join(run.directory, LOG)
    tell(events.Started(attempt, log))
    started, clock = time.time(), time.monotonic()
    with capture(log, redirect=redirect, packages=request.packages, show=tell):
        try:
            inputs = _open_inputs(request)
            check_unchanged(*external)  # before the body to waste no work
            body = request.step.function(run, **_grouped(request, inputs), **request.arguments)
            inputs |= _open_followed(request)
            check_unchanged(*external)  # after it to publish no mixed data
            seconds = time.monotonic() - clock
            record = _record(request, run, body, inputs, started, seconds)
            won = _publish(request, held, record)
        except Exception as error:  # noqa: BLE001 - a body may raise anything; it becomes data
            seconds, cause = time.monotonic() - clock, one_line(error)
            if isinstance(error, Preempted):
                logger.info("%s", cause)
            else:
                logger.error("%s", traceback.format_exc())
            # Another attempt may have published and deleted this one's files, hence the error.
            with contextlib.suppress(PonenteError, OSError):
                if request.published():
                    return Outcome(Ending.REUSED, seconds, log=log)
            ending = _ending(error, stopping=workers.stopping)
            if ending is Ending.STOPPED:
                cause = cause.replace("preempted", "saved", 1)
            elif ending is not Ending.PREEMPTED:
                _keep_failure(run, cause)
            return Outcome(ending, seconds, cause, log)
    ending = Ending.PUBLISHED if won else Ending.REUSED
    return Outcome(ending, time.monotonic() - clock, log=log)


def _ending(error: Exception, *, stopping: bool) -> Ending:
    match error:
        case Cancelled():
            return Ending.STOPPED
        case Preempted():
            return Ending.STOPPED if stopping else Ending.PREEMPTED
        case CorruptOutput() | FileNotFoundError():
            return Ending.CORRUPT  # a retry does not help, unlike after other errors of the system
        case ResourcesUnavailable():
            return Ending.UNAVAILABLE
        case OSError() | WorkerLost():
            return Ending.LOST
    return Ending.FAILED


def _keep_failure(run: StepContext, cause: str) -> None:
    failure = json.dumps({"cause": cause, "time": time.time()})
    try:
        storage.write_atomic(storage.join(run.directory, FAILURE), failure.encode())
    except (PonenteError, OSError) as error:
        # Only later commands read the file; the driver gets the cause in the outcome.
        logger.warning("could not write the failure record: %s", error)


def _open_inputs(request: Request) -> dict[str, tuple[str, Manifest]]:
    opened, wanted = {}, {n: read for n, read in request.inputs.items() if read.live is None}
    loaded = concurrently(
        lambda read: manifest.load_late(read.path, read.key), wanted.values(), request.root
    )
    for (name, read), found in zip(wanted.items(), loaded, strict=True):
        path = read.path
        if found is None:
            raise CorruptOutput(f"{path}: input {name!r} of {request.label} is gone; run again")
        if request.step.output.needs_input(name) and not request.link:
            path, found = bring_home(request.root.rpartition("/")[0], path, found)
        opened[name] = (path, msgspec.structs.replace(found, label=read.label))
    return opened


def _open_followed(request: Request) -> dict[str, tuple[str, Manifest]]:
    """The live inputs, which must be published by the time the body ends."""
    opened = {}
    for name, read in request.inputs.items():
        if read.live is None:
            continue
        found = manifest.load_built(read.path, read.key, read.live.replaces)
        if found is None:
            raise InputError(
                f"{request.label} ended before its live input {name!r} was published in "
                f"{read.path}; a step that follows another one ends after it"
            )
        opened[name] = (read.path, found)
    return opened


def _grouped(request: Request, inputs: dict[str, tuple[str, Manifest]]) -> dict[str, Any]:
    """The body's input arguments: artifacts or `Live`, tuples of them, or None."""
    arguments: dict[str, Any] = {}
    for name, declared in request.step.signature.inputs.items():
        if name in request.arguments:  # a value in place of an input
            continue
        opened = tuple(
            Live(declared.kind, read.path, read.key, read.live)
            if read.live is not None
            else declared.kind(*inputs[n])
            for n, read in request.inputs.items()
            if argument_of(n) == name
        )
        arguments[name] = opened if declared.many else opened[0] if opened else None
    return arguments


def _record(
    request: Request,
    run: StepContext,
    body: Mapping[str, Any] | Reference | None,
    inputs: dict[str, tuple[str, Manifest]],
    started: float,
    seconds: float,
) -> Manifest:
    made_by, edited = provenance.of_attempt(request.provenance, request.step.environment)
    if edited:
        run.warn(f"edited after the run began, and used as edited: {named(edited)}")
    contents = {name: found.content for name, (_, found) in inputs.items()}
    contents |= {name: listing.digest for name, listing in request.listings.items()}
    if isinstance(body, Reference):
        chosen, alias = refer_to(body, request.root, inputs, link=request.link)
        shards, result = chosen.shards, plain_result(body.result)
        # The chosen artifact's class determines which inputs are part of its content, not
        # `step.output`; the digest of its own content includes them already.
        opened = {"origin": body.artifact.manifest.content}
        needs = (alias.input,) if alias.input else None
    else:
        shards, alias = _declared(run), None
        result = plain_result({} if body is None else body)
        opened = {name: c for name, c in contents.items() if request.step.output.reads(name)}
        needs = tuple(filter(request.step.output.needs_input, inputs))
    return Manifest(
        key=request.key,
        step=request.identity.step,
        version=request.identity.version,
        label=request.label,
        config=request.identity.config,
        inputs=manifest.describe_inputs(request.root, inputs),
        shards=shards if alias else keep_shards(run.root, run.attempt, shards),
        result=result,
        content=digests.content(shards, result, opened),
        action=digests.action(request.identity, contents),
        build=request.build,
        attempt=run.attempt,
        started=started,
        seconds=seconds,
        provenance={**made_by, **run.other_code()},
        alias=alias,
        sources=manifest.keep_sources(request.root, request.listings),
        needs=needs,
    )


def _declared(run: StepContext) -> tuple[Shard, ...]:
    """The shards to publish; `StoreUnavailable` for one without its record or files."""
    shards = tuple(run.declared.values())
    recorded = run.ledger.shard_names()
    for shard in shards:
        # A listing may be out of date: read the record of a shard that it lacks.
        if shard.name not in recorded and run.ledger.find(shard.name) is None:
            gone = f"{run.root}: shard {shard.name!r} was deleted before it was published"
            raise StoreUnavailable(f"{gone}; the next attempt writes it again")
    for shard, problem in wrong_sizes(run.root, shards):
        run.drop(shard.name)
        raise StoreUnavailable(f"{problem}; the next attempt writes shard {shard.name!r} again")
    return shards


def _publish(request: Request, held: lease.Lease, record: Manifest) -> bool:
    """Publish and tidy up; returns whether this attempt's output is the published one."""
    url, won = storage.join(request.root, manifest.NAME), True
    if request.replaces:
        _replace(request, held, url, record.to_bytes())
    elif not storage.create(url, record.to_bytes()):
        load_verified(request.root, request.key)
        logger.warning("another attempt published first; this one's output is discarded")
        won = False
    try:
        if won:
            outputs.remember(request.root, record.action, request.key)
        left_overs.tidy(request.root, held, record.attempt, lost=not won)
    except (PonenteError, OSError) as error:
        logger.warning("could not index the output or delete left-over files: %s", error)
    return won


def _replace(request: Request, held: lease.Lease, url: str, data: bytes) -> None:
    """Replace the manifest that was to be replaced, and no other one."""
    old, version = b"", ""
    with contextlib.suppress(FileNotFoundError):
        old, version = storage.read_versioned(url)
    # Checked after the version was read: a later publication makes `replace_if` fail.
    replaced = not request.published() and held.newest()
    if replaced and version:
        # Readers may have the output open, and `tidy` deletes only files that no manifest lists.
        storage.create(storage.join(request.root, RETIRED, f"{request.replaces}.json"), old)
        replaced = storage.replace_if(url, data, version)
    elif replaced:
        replaced = storage.create(url, data)
    if not replaced:
        raise WorkerLost(f"{request.root}: another process took over; this output is discarded")
