"""What happens in a run, as typed values: a line of the event log each, in JSON."""

# ruff: noqa: D101 - names and fields say it

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec


def _tag(name: str) -> str:
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_tag):
    """`time` in Unix seconds, by the emitter's clock; `step` and `key` of the node, if of one."""

    time: float = 0.0
    step: str = ""
    key: str = ""


class RunStarted(_Event, frozen=True):
    run: str = ""
    experiment: str = ""
    file: str = ""
    command: list[str] = []
    store: str = ""
    settings: dict[str, Any] = {}
    spot: bool = False  # on preemptible machines
    graph: list[dict[str, Any]] = []  # a `StepRecord`'s first fields each


class Provenance(_Event, frozen=True):
    git: dict[str, Any] | None = None


class PhaseBegan(_Event, frozen=True, tag="phase"):
    """What a step does, or the run before its first step."""

    phase: str = ""


class Hit(_Event, frozen=True):
    """The step is up to date; its output took `seconds` when it was built."""

    seconds: float = 0.0
    origin: str | None = None  # the other store or adopted directory that it came from


class Queued(_Event, frozen=True):
    reason: str | list[str] = ""


class Submitted(_Event, frozen=True):
    pass


class Waiting(_Event, frozen=True):
    """Another run, `holder`, builds the same output."""

    holder: str = ""


class WaitingForResources(_Event, frozen=True):
    """A step has waited `seconds` for its hardware, which is there if the wait is `over`."""

    cause: str = ""
    seconds: float = 0.0
    over: bool = False


class Started(_Event, frozen=True):
    """An attempt began."""

    attempt: str = ""
    log: str = ""


class Progress(_Event, frozen=True):
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    note: str = ""


class ShardFinished(_Event, frozen=True, tag="shard"):
    """A shard was finished."""

    shard: str = ""
    bytes: int = 0


class ShardRetried(_Event, frozen=True):
    shard: str = ""
    cause: str = ""
    tries: int = 0


class Warned(_Event, frozen=True, tag="warning"):
    message: str = ""


class Retrying(_Event, frozen=True):
    """A request to a store failed and is repeated; of the driver's own if it has no step."""

    what: str = ""
    cause: str = ""
    attempt: int = 0
    seconds: float = 0.0


class Output(_Event, frozen=True):
    """What a step printed; not in the event log, as it is in the step's."""

    text: str = ""


class Retried(_Event, frozen=True):
    """An attempt ended without an output, and another one will begin."""

    cause: str = ""
    tries: int = 0
    preempted: bool = False


class Finished(_Event, frozen=True):
    seconds: float = 0.0
    status: str = "published"  # or "reused": another run published
    result: dict[str, Any] = {}


class Failed(_Event, frozen=True):
    cause: str = ""
    log: str = ""


class Stopped(_Event, frozen=True):
    cause: str = ""


class Skipped(_Event, frozen=True):
    cause: str = ""


class Stopping(_Event, frozen=True):
    cause: str = ""


class RunFinished(_Event, frozen=True):
    outcome: str = "ok"
    executed: list[str] = []
    pages: dict[str, str] = {}
    cause: str = ""


Event = (
    (RunStarted | Provenance | PhaseBegan | Stopping | RunFinished)
    | (Hit | Queued | Submitted | Waiting | WaitingForResources | Started | Retried)
    | (Progress | ShardFinished | ShardRetried | Warned | Retrying | Output)
    | (Finished | Failed | Stopped | Skipped)
)
Emit = Callable[[Event], None]

_decoder = msgspec.json.Decoder(Event, strict=False)
_encoder = msgspec.json.Encoder(enc_hook=str)


def encode(value: Any) -> bytes:
    """JSON: null for NaN and infinity, text for what JSON lacks, "?" for what UTF-8 lacks."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # such as of a file's name
        return _encoder.encode(_in_utf8(msgspec.to_builtins(value, enc_hook=str)))


def _in_utf8(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_in_utf8(name): _in_utf8(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return [_in_utf8(part) for part in tree]
    return tree.encode("utf-8", "replace").decode() if isinstance(tree, str) else tree


def from_line(line: bytes) -> Event:
    """The event in a line of a log; `ValueError` for a torn line or a kind that is not known."""
    event = _decoder.decode(line)
    if not event.time:
        raise ValueError("an event without a time")
    return event
