"""Checks of what else a run talks to: Ray, a cluster, the hub that has the documents."""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from pipeline.doctor.finding import Finding, ask, describe

_HUB = "https://huggingface.co"
_RAY_PORT, _CLIENT_PORT = 6379, 10001
_RAY_SECONDS, _CONNECT_SECONDS, _HUB_SECONDS = 60.0, 3.0, 5.0
_TRUE = {"1", "ON", "YES", "TRUE"}


def ray(_: str) -> Finding:
    """Ray imports, in a process of its own."""
    status, out, err = ask(
        [sys.executable, "-c", "import ray; print(ray.__version__)"], _RAY_SECONDS
    )
    if status == 0:
        return Finding("ray", "ok", out.split()[-1])
    last = "no answer" if status is None else (err.strip() or f"exit status {status}")
    return Finding(
        "ray",
        "fail",
        f"does not import: {last.splitlines()[-1]}",
        "pip install -e . in the checkout; --executor inline runs without Ray",
    )


def cluster(_: str) -> Finding:
    """The cluster that RAY_ADDRESS names answers, and tokens are as Ray will want them."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return Finding("cluster", "ok", "RAY_ADDRESS is not set: Ray starts on this machine")
    mode, hint = authentication()
    if address != "auto":
        try:
            host, port = _endpoint(address)
        except ValueError:
            return Finding(
                "cluster",
                "fail",
                f"RAY_ADDRESS={address} is no address",
                "host:6379, ray://host:10001 or auto",
            )
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            return Finding(
                "cluster",
                "fail",
                f"RAY_ADDRESS={address}: {describe(error)}",
                "start the cluster, open its port, or unset RAY_ADDRESS",
            )
    answers = "found when it is joined" if address == "auto" else "accepts connections"
    found = f"RAY_ADDRESS={address} {answers}; authentication {mode}"
    return Finding("cluster", "warn" if hint else "ok", found, hint)


def _endpoint(address: str) -> tuple[str, int]:
    """(host, port) of a Ray address. Raises `ValueError` when it is none."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme not in ("ray", "http", "https"):
        raise ValueError(address)
    place = rest.split("/")[0]
    if ":" not in place:
        place += f":{_CLIENT_PORT if scheme == 'ray' else _RAY_PORT}"
    host, _, port = place.rpartition(":")
    if not host.strip("[]") or not 0 < int(port) < 2**16:
        raise ValueError(address)
    return host.strip("[]"), int(port)


def authentication() -> tuple[str, str]:
    """(what Ray will do, advice or nothing) from RAY_AUTH_MODE and where a token may lie."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    place = _token_place()
    if mode not in ("", "token", "disabled"):
        return f"unknown mode {mode!r}", "RAY_AUTH_MODE is token or disabled"
    if mode == "disabled":
        hint = "a cluster that wants a token will refuse: set RAY_AUTH_MODE=token"
        return "disabled", f"a token lies at {place}, but is not used; {hint}" if place else ""
    if place:
        return f"with the token of {place}", ""
    if mode == "token":
        advice = "set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        return "by token, but there is none", f"{advice}, or RAY_AUTH_MODE=disabled if it has none"
    return "without a token", ""


def _token_place() -> str:
    """Where Ray would read a token from; empty when nowhere. The token itself is not read."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path:
        return "RAY_AUTH_TOKEN_PATH" if Path(path).is_file() else ""
    return "~/.ray/auth_token" if Path("~/.ray/auth_token").expanduser().is_file() else ""


def hub(_: str) -> Finding:
    """The hub answers, unless the user said to stay offline."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or _HUB
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return Finding("hub", "ok", f"not asked: {name} is set, only cached files are used")
    start = time.perf_counter()
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        # It answered; what it thinks of HEAD on its front page does not matter.
        status = error.code
        error.close()
    except (OSError, ValueError) as error:
        return _unreachable(endpoint, describe(error))
    if status >= 500 or status == 407:
        return _unreachable(endpoint, f"HTTP status {status}")
    return Finding("hub", "ok", f"{endpoint}, {(time.perf_counter() - start) * 1e3:.0f} ms")


def _unreachable(endpoint: str, why: str) -> Finding:
    return Finding(
        "hub",
        "warn",
        f"{endpoint}: {why}",
        "no documents from the hub: set HF_ENDPOINT to a mirror or https_proxy to a proxy, or "
        "HF_HUB_OFFLINE=1 to use what is cached; python-docs:// needs no hub",
    )
