"""Retries requests to a source: classifies failures as transient or permanent, and words them.

Transient errors (429, 5xx, a connection that is reset, unresponsive or cut short, an unusable
response) are retried with the back-off of `pipeline.store.retry`, until `TRIES` or the deadline of
`patience()`; the client of gs:// retries by itself. Permanent errors are an `InputError` at once.
Messages name the file by its URL without user, password and query, and never quote a header.
"""

from __future__ import annotations

import functools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TypeVar

from pipeline.errors import InputError, PonenteError, StorageError, StoreUnavailable
from pipeline.store import retry

GIVE_UP_SECONDS = 600.0  # the hub counts requests in windows of five minutes
TRIES = 50
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 30.0
PATIENCE_VARIABLE = "PONENTE_SOURCE_SECONDS"

_T = TypeVar("_T")
_BUSY = (408, 425, 429)
_DEEPEST = 4  # causes of an exception that are followed
_OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of the hub's client


class TryAgain(Exception):
    """The response is unusable, but a retry may succeed."""


class Answered(Exception):
    """An HTTP status other than success."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers


class NotThere(InputError):
    """The store has no such file."""


@dataclass(frozen=True)
class _Verdict:
    reason: str
    passes: bool
    status: int | None = None
    wait: float | None = None


def patience() -> float:
    """Deadline of a request with its retries, in seconds: `PONENTE_SOURCE_SECONDS`, or 600."""
    return retry.seconds_of(PATIENCE_VARIABLE, GIVE_UP_SECONDS)


def redact(text: str) -> str:
    """`text` without secrets, for a message: one line, URLs without user and query, no token."""
    text = " ".join(text.split())
    text = re.sub(r"(\w+://)[^/\s@]+@(?=[^/\s]*(?:[/\s]|$))", r"\1", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1?...", text)
    return re.sub(r"\b(hf_|(?i:bearer)\s+)[\w.~+/=-]{6,}", r"\1...", text)


def with_retries(
    what: str,
    action: Callable[[float], _T],
    seconds: float | None = None,
    *,
    blocks: bool = False,
) -> _T:
    """The result of `action(seconds left)`, retried while its errors are transient.

    Args:
        what: the request's name in messages, such as "hf://...: bytes 0-99"; it is redacted.
        seconds: deadline of all retries; None or more than `patience()` means `patience()`.
        blocks: the client may ignore the seconds left; see `run_with_timeout`.

    Raises:
        InputError: not permitted, missing (`NotThere`), not a URL, or the hub's client is offline.
        StoreUnavailable: retries or time were used up.
    """
    what = redact(what)
    limit = patience() if seconds is None else min(seconds, patience())
    attempts = retry.Retry(
        what,
        retry.Policy(limit, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, TRIES, cancellable=True),
        place=_place(what),
        remedy=f"; run again when the store answers, or set {PATIENCE_VARIABLE} to wait longer",
    )
    while True:
        try:
            left = max(attempts.left, 0.05)
            found = run_with_timeout(left, partial(action, left)) if blocks else action(left)
            attempts.succeeded()
            return found
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{what}: {redact(str(error))}") from None
        except PonenteError:
            raise
        except Exception as error:  # noqa: BLE001 - every client has its own; classified below
            failure, verdict = error, _judge(error)
        # Raised outside `except`: the client's message, as context, could show a secret.
        if not verdict.passes:
            raise _refusal(what, verdict)
        asked = f" (it asks to wait {verdict.wait:.0f} s)" if verdict.wait else ""
        attempts.sleep(attempts.pause(failure, verdict.reason + asked, verdict.wait or 0.0))


def _place(what: str) -> str:
    """The service that a response proves reachable: the host of an http(s) URL, else the scheme."""
    found = re.match(r"https?://[^/\s]+", what)
    return found[0] if found else what.partition(":")[0]


def run_with_timeout(seconds: float, action: Callable[[], _T]) -> _T:
    """The result of `action()`, or `TimeoutError` after `seconds`, even if its client blocks.

    After a timeout the action continues in its thread and its result is lost, so use this for reads
    only.
    """
    future: Future[_T] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            future.set_exception(error)

    # Not an executor, whose threads delay the exit of the process.
    threading.Thread(target=work, daemon=True, name="source-listing").start()
    attempts = retry.Retry("a source", retry.Policy(seconds, cancellable=True))
    end = time.monotonic() + seconds
    while not wait([future], min(max(end - time.monotonic(), 0.0), 0.2)).done:
        if time.monotonic() > end:
            raise TimeoutError(f"no answer in {seconds:.1f} s")
        attempts.check()
    return future.result()


def _judge(error: Exception) -> _Verdict:
    cause: BaseException | None = error
    # fsspec's HTTP client raises FileNotFoundError for any failed lookup, caused by the real error.
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
        return _Verdict("a response that is not JSON", True)
    offline = type(error).__name__ == _OFFLINE
    return _Verdict(reason, isinstance(error, _passing_errors()) and not offline)


@functools.cache
def _passing_errors() -> tuple[type[Exception], ...]:
    import aiohttp
    import httpx2

    ours = (ConnectionError, TimeoutError, socket.gaierror)
    return (*ours, aiohttp.ClientError, httpx2.TransportError)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by the Retry-After header or the hub's RateLimit; None without them."""
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
