"""Retrying requests to a source: which failures are transient and what their messages say.

A store that is busy (429, with or without Retry-After, 5xx), a connection that is reset, silent or
cut short, and an answer that is no answer are retried as `pipeline.store.retry` says, until `TRIES`
or the seconds of `patience()` are used up. What no retry mends (not permitted, not there, changed)
is an `InputError` at once. gs:// is retried by its own client and only its verdict is passed on, so
that attempts do not multiply.

Messages name the place by its URL without user, password and query, and never quote a header.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from pipeline.errors import InputError, PonenteError, StorageError, StoreUnavailable
from pipeline.store import retry

GIVE_UP_SECONDS = 600.0  # the hub counts requests in windows of five minutes
TRIES = 50
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 30.0
PATIENCE_VARIABLE = "PONENTE_SOURCE_SECONDS"

_T = TypeVar("_T")
_BUSY = (408, 425, 429)
_DEEPEST = 4
_OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of the hub's client


class TryAgain(Exception):
    """What came back cannot be used, and may be right the next time."""


class Answered(Exception):
    """An HTTP status other than success."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers


class NotThere(InputError):
    """The store says that there is no such file."""


@dataclass(frozen=True)
class _Verdict:
    reason: str
    passes: bool
    status: int | None = None
    wait: float | None = None


def patience() -> float:
    """Seconds for which one request is tried; `PONENTE_SOURCE_SECONDS` sets another number.

    Raises:
        InputError: the variable is no number of seconds.
    """
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(text) if text else GIVE_UP_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError(
            f"{PATIENCE_VARIABLE}={text!r}: expected a number of seconds; correct it or unset it"
        )
    return seconds


def redact(text: str) -> str:
    """`text` as a message may show it: one line, URLs without user and query, no token."""
    text = " ".join(text.split())
    text = re.sub(r"(\w+://)[^/\s@]+@(?=[^/\s]*(?:[/\s]|$))", r"\1", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1?...", text)
    return re.sub(r"\b(hf_|(?i:bearer)\s+)[\w.~+/=-]{6,}", r"\1...", text)


def with_retries(what: str, action: Callable[[float], _T], seconds: float | None = None) -> _T:
    """`action(seconds left)`, retried while its failure is transient.

    Args:
        what: the place for messages, such as "hf://...: bytes 0-99"; shown as `redact` does.
        action: raises when it failed. A `PonenteError` is passed on as it is.
        seconds: to keep trying for, at most; None for `patience()`.

    Raises:
        InputError: not permitted, not there (`NotThere`), not an address, or out of reach.
        StoreUnavailable: it failed until attempts or time were used up; says how often and why.
        StorageError: the store refused for a reason that no retry mends.
    """
    what = redact(what)
    limit = patience() if seconds is None else min(seconds, patience())
    attempts = retry.Retry(
        what,
        retry.Policy(limit, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, TRIES),
        place=_place(what),
        remedy=f"; run again when the store answers, or set {PATIENCE_VARIABLE} to wait longer",
    )
    while True:
        try:
            found = action(max(attempts.left, 0.05))
            attempts.succeeded()
            return found
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{what}: {redact(str(error))}") from None
        except PonenteError:
            raise
        except Exception as error:  # noqa: BLE001 - each client has its own; judged below
            failure, verdict = error, _judge(error)
        # Raised outside of `except`, or the client's message would be shown as the context.
        if not verdict.passes:
            raise _refusal(what, verdict)
        asked = f" (it asks to wait {verdict.wait:.0f} s)" if verdict.wait else ""
        attempts.sleep(attempts.pause(failure, verdict.reason + asked, verdict.wait or 0.0))


def _place(what: str) -> str:
    """Whose answers count as contact: the host of an https:// address, else the service."""
    found = re.match(r"https?://[^/\s]+", what)
    return found[0] if found else what.partition(":")[0]


def run_with_timeout(seconds: float, action: Callable[[], _T]) -> _T:
    """`action()`, or `TimeoutError` after `seconds`, whatever a client waits for inside.

    The action then continues in its thread and its result is lost: for reads only.
    """
    done: list[Callable[[], _T]] = []

    def work() -> None:
        try:
            result = action()
            done.append(lambda: result)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            done.append(functools.partial(_raise, error))

    thread = threading.Thread(target=work, daemon=True, name="source-listing")
    thread.start()
    attempts, end = retry.Retry("a source", retry.Policy(seconds)), time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, 0.2))
        attempts.check()
    if not done:
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    return done[0]()


def _raise(error: BaseException) -> Any:
    raise error


def _judge(error: Exception) -> _Verdict:
    """What a client's exception means."""
    cause: BaseException | None = error
    # HTTP's "not found" stands for every failure to look, with the real one as its cause.
    for _ in range(_DEEPEST):
        if not isinstance(cause, FileNotFoundError) or cause.__cause__ is None:
            break
        cause = cause.__cause__
    error = cause if isinstance(cause, Exception) else error
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        headers = getattr(answer, "headers", None) or getattr(error, "headers", None) or {}
        busy = status in _BUSY or status >= 500
        return _Verdict(f"HTTP {status}", busy, status, _asked_wait(headers) if busy else None)
    if isinstance(error, FileNotFoundError):
        return _Verdict("not found", False, 404)
    reason = redact(f"{type(error).__name__}: {error}")
    if isinstance(error, TryAgain):
        return _Verdict(redact(str(error)), True)
    if isinstance(error, json.JSONDecodeError):
        return _Verdict("an answer that is no JSON", True)
    offline = type(error).__name__ == _OFFLINE
    return _Verdict(reason, isinstance(error, _passing_errors()) and not offline)


@functools.cache
def _passing_errors() -> tuple[type[Exception], ...]:
    import aiohttp
    import httpx2

    ours = (ConnectionError, TimeoutError, socket.gaierror)
    return (*ours, aiohttp.ClientError, httpx2.TransportError)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait, by Retry-After or the hub's RateLimit."""
    after = headers.get("Retry-After") or headers.get("retry-after") or ""
    if re.fullmatch(r"\d{1,9}", after.strip()):
        return float(after)
    try:
        return max((parsedate_to_datetime(after) - datetime.now(UTC)).total_seconds(), 0.0)
    except (TypeError, ValueError):
        pass
    limit = headers.get("RateLimit") or headers.get("ratelimit") or ""
    empty, reset = re.search(r"\br=0\b", limit), re.search(r"\bt=(\d{1,9})\b", limit)
    return float(reset[1]) if empty and reset else None


def _refusal(what: str, verdict: _Verdict) -> PonenteError:
    hub = "hf://" in what
    if verdict.status in (401, 403):
        advice = (
            "set HF_TOKEN to a token that may read it, and accept the dataset's terms on its page "
            "if it is gated"
            if hub
            else "expected an address that may be read without a login"
        )
        return InputError(f"{what}: not permitted ({verdict.reason}); {advice}")
    if verdict.status in (404, 410):
        advice = ", or set HF_TOKEN if the repository is private" if hub else ""
        return NotThere(
            f"{what}: expected a file, found none ({verdict.reason}); check the address"
            f"{' and the revision' if hub else ''}{advice}"
        )
    if verdict.reason.startswith(_OFFLINE):
        return InputError(f"{what}: the hub's client is set to be offline; unset HF_HUB_OFFLINE")
    if verdict.status is None and verdict.reason.startswith(("ValueError", "HfUriError")):
        return InputError(f"{what}: not an address of a source ({verdict.reason}); correct it")
    return StorageError(f"{what}: the store refused ({verdict.reason}); check address and login")
