"""Try the queues of several zones, one after the other, until one gives the chips.

In each zone the head is made as for one zone, and requests the chips itself. From here the queue is
asked for its state, in its own words. A zone that is left, also by Ctrl-C, is left when a listing
has neither its request nor its machines.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.launch.job import Provisioning

_POLL_SECONDS = 15.0
_LATE_SECONDS = 10.0  # a request that was interrupted may be listed so late
_SETUP_SECONDS = 1800.0  # for the head to be set up, which comes before its request
# https://cloud.google.com/tpu/docs/queued-resources: the other states are of a wait.
_ENDED = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")
_GIVEN = ("PROVISIONING", "ACTIVE")


@dataclass(frozen=True)
class Words:
    """What a queue says of a request; an empty state while it has none."""

    state: str = ""
    message: str = ""

    def __str__(self) -> str:
        state = self.state or "no request yet: the head is being set up"
        return f"{state}: {self.message}" if self.message else state


def words(described: str) -> Words:
    """From the JSON of `queued-resources describe` (QueuedResourceState of the Cloud TPU API)."""
    try:
        state = json.loads(described)["state"]
        error = (state.get("failedData") or {}).get("error") or {}
        return Words(str(state["state"]), " ".join(str(error.get("message", "")).split()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Words()


def first_given(
    zones: Mapping[str, Provisioning],
    make: Callable[[Provisioning], None],
    patience: float,
    tell: Callable[[str], None],
) -> str:
    """The first zone whose queue gives the chips; raises `InputError` if none does.

    `make` calls a zone's commands; a request may wait for `patience` seconds in each zone.
    """
    for zone, made in zones.items():
        if (left := _left(made)) != []:  # it would be deleted with what this launch makes
            found = f"is there ({', '.join(left)})" if left else "cannot be looked for"
            raise InputError(
                f"launch: an earlier launch of this name {found} in {zone}; nothing "
                f"was made. Look at it with: {made.listed[-1]}"
            )
    said = []
    for zone, made in zones.items():
        try:
            make(made)
            last = _wait(zone, made, patience, tell)
            if last.state in _GIVEN:
                return zone
        except InputError as error:
            last = Words("refused", str(error).partition(";")[0])
        except BaseException:
            leave(zone, made, tell)
            raise
        said.append(f"{zone}: {last}")
        leave(zone, made, tell)
    raise InputError(
        f"launch: no zone gave the chips, and nothing is left in any ({'; '.join(said)}); try "
        "--spot, --capacity flex-start, a longer --zone-wait or other --zones"
    )


def _wait(zone: str, made: Provisioning, patience: float, tell: Callable[[str], None]) -> Words:
    begun, last = time.monotonic(), Words()
    tell(f"{zone}: {last}")
    while True:
        found = words(_output(made.queue) or "")
        if found.state and found != last:
            tell(f"{zone}: {found}")
            begun = begun if last.state else time.monotonic()
            last = found
        waited = time.monotonic() - begun
        if last.state in (*_ENDED, *_GIVEN) or waited > (
            patience if last.state else _SETUP_SECONDS
        ):
            return last
        time.sleep(_POLL_SECONDS)


def leave(zone: str, made: Provisioning, tell: Callable[[str], None]) -> None:
    """Delete what a zone has until listings have nothing of it; a second Ctrl-C ends that too."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the deletion
            tell(f"{zone}: {text}")

    interrupted = False
    while True:
        try:
            # The head first, which could make a new request. They fail where there is nothing.
            for command in made.undo:
                _output(command)
            time.sleep(_LATE_SECONDS)
            if (left := _left(made)) == []:
                break
            say(f"{', '.join(left or ['a listing failed'])}; deleting again")
        except KeyboardInterrupt:
            if interrupted:
                say(f"may still have machines; this ends them: {'; '.join(made.undo)}")
                raise
            interrupted = True
            say("what it has is deleted first")
    say("left; nothing of it is listed")
    if interrupted:
        raise KeyboardInterrupt


def _left(made: Provisioning) -> list[str] | None:
    """Names of the launch's machines and requests that are listed; None if a listing fails."""
    listed = [_output(command) for command in made.listed]
    if None in listed:
        return None
    return [name for text in listed for name in (text or "").split() if name in made.names]


def _output(command: str) -> str | None:
    """What a command prints; None if it fails. Ctrl-C does not reach it: it may be deleting."""
    done = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    return None if done.returncode else done.stdout
