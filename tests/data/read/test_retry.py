"""Trying again: what may pass, how long to wait, when to give up, and what a message shows."""

import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest

from data.read import retry
from data.read.retry import Answered, TryAgain, redact, run_with_timeout, with_retries
from pipeline.errors import InputError, StorageError, StoreUnavailable
from pipeline.store import retry as store_retry
from pipeline.store.retry import UNREACHABLE_SECONDS, Retry


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": timedelta(seconds=100)}, 100),
        ({"Retry-After": timedelta(seconds=-100)}, 0),
        ({"Retry-After": "soon"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({}, None),
    ],
)
def test_how_long_a_server_asks_to_wait(headers, seconds):
    """Seconds, a date, or the hub's own header."""
    now = datetime.now(UTC)
    sent = {
        k: format_datetime(now + v) if isinstance(v, timedelta) else v for k, v in headers.items()
    }
    assert retry._asked_wait(sent) == pytest.approx(seconds, abs=60)


def test_waits_grow_and_are_bounded(monkeypatch):
    """Each about twice the one before, up to the longest; tries end at `TRIES`."""
    waits = []
    monkeypatch.setattr(Retry, "sleep", lambda self, seconds: waits.append(seconds))
    monkeypatch.setattr(retry, "TRIES", 12)

    def fail(left):
        raise TryAgain("no")

    with pytest.raises(StoreUnavailable, match="failed 12 times"):
        with_retries("x", fail)
    plain = [min(0.25 * 2**n, 30) for n in range(11)]
    assert all(0.5 * p <= wait <= 1.5 * p for wait, p in zip(waits, plain, strict=True))


class Clock:
    """The time of the retries, in which only sleeping takes any."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_name_that_does_not_resolve_is_given_up_early(monkeypatch, wrapped):
    """Tried again, for seconds and not for the default patience; the message says what to do."""
    clock, tries = Clock(), []
    monkeypatch.setattr(store_retry, "time", clock)
    monkeypatch.setattr(store_retry, "_reached", set())
    monkeypatch.delenv(retry.PATIENCE_VARIABLE, raising=False)

    def fail(left):
        tries.append(left)
        cause = socket.gaierror(socket.EAI_NONAME, "no name")
        if wrapped:
            raise aiohttp.ClientConnectionError("x") from cause
        raise cause

    with pytest.raises(InputError, match=r"hf://a: cannot be reached .*check the address"):
        with_retries("hf://a", fail)
    assert len(tries) > 1
    assert clock.now <= UNREACHABLE_SECONDS


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_patience_that_is_no_number_is_refused(monkeypatch, text):
    """The variable is named."""
    monkeypatch.setenv("PONENTE_SOURCE_SECONDS", text)
    with pytest.raises(InputError, match="PONENTE_SOURCE_SECONDS"):
        with_retries("x", lambda left: 0)


def test_what_a_failure_of_ours_means_is_not_hidden():
    """An error of the engine passes; what no client raises for a busy store is not tried again."""
    tries = []

    def fail(error):
        tries.append(error)
        raise error

    with pytest.raises(InputError, match="mine"):
        with_retries("x", lambda left: fail(InputError("mine")))
    with pytest.raises(StorageError, match="HTTP 418"):
        with_retries("x", lambda left: fail(Answered(418, {})))
    with pytest.raises(StorageError, match="KeyError"):
        with_retries("x", lambda left: fail(KeyError("k")))
    assert len(tries) == 3


def test_an_action_that_does_not_end_is_left():
    """A listing that hangs inside of a client is an error in time."""
    with pytest.raises(TimeoutError, match=r"no answer in 0\.1 s"):
        run_with_timeout(0.1, lambda: time.sleep(2))
    assert run_with_timeout(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        run_with_timeout(5, lambda: {}["x"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://u:p@host/x?Signature=abc failed", "https://host/x?... failed"),
        ("gs://bucket/a@b/x", "gs://bucket/a@b/x"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        ("token hf_abcdefghijkl\nBearer abcdefgh", "token hf_... Bearer ..."),
    ],
)
def test_what_a_message_shows(text, expected):
    """One line, no login, no query, no token."""
    assert redact(text) == expected


def test_contact_with_one_host_is_none_with_another():
    """Answers of a host say nothing about other hosts; those of a service count for all of it."""
    assert retry._place("https://a.org/x.parquet: bytes 0-9") == "https://a.org"
    assert retry._place("https://b.org:8443") == "https://b.org:8443"
    assert retry._place("hf://datasets/owner/name: listing") == "hf"


def test_the_clients_errors_are_known():
    """What aiohttp and the hub's client raise for a broken connection may pass."""
    assert issubclass(aiohttp.ClientPayloadError, retry._passing_errors())
    assert not issubclass(PermissionError, retry._passing_errors())
