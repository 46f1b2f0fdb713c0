"""The requirements on a cluster's workers: the driver's code, checked by digest, and its store."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.store import storage

ROOT = Path(__file__).parents[3]
TIMEOUT = "PONENTE_HEARTBEAT_TIMEOUT"  # read by `heartbeat.heartbeat_timeout`
# Read when Ray starts; the user's environment takes precedence. At Ray's default niceness of 15,
# workers take minutes to start while another program uses the CPUs.
STARTING = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_VARIABLE = "PONENTE_CODE"
# Without a trailing slash, with which Ray would walk through these directories.
_EXCLUDES = ["/runs", "/.venv", "/.git", "/tests", "/docs", "__pycache__"]


def code_digest(root: Path) -> str:
    """SHA-256 over path and content of every Python file that is sent from `root`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _sent(root) if path.suffix == ".py" and path.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sent(root: Path) -> list[Path]:
    # Ray's own function, since its rules for ignore files are special; it has no public API.
    from ray._private.runtime_env import packaging

    excludes, found = [packaging._get_excludes(root, _EXCLUDES)], []
    follow = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    logger = logging.getLogger(__name__)
    packaging._dir_travel(root, excludes, found.append, include_gitignore=follow, logger=logger)
    return found


def runtime_environment(root: Path = ROOT) -> dict[str, Any]:
    """Ray's runtime environment, which sends workers the driver's code and its digest."""
    handed = {name: os.environ[name] for name in (TIMEOUT,) if name in os.environ}
    return {
        "working_dir": str(root),
        "excludes": _EXCLUDES,
        "env_vars": {_VARIABLE: code_digest(root), **handed},
    }


@contextlib.contextmanager
def handed(environment: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, this process has these environment variables of the driver.

    Not by Ray's runtime environment, which is logged and shown: some are secrets.
    """
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


def on_cluster() -> bool:
    return _VARIABLE in os.environ


@functools.cache
def _own_digest() -> str:
    return code_digest(ROOT)


def require_same_code() -> None:
    """Refuse to work in a process whose code differs from the driver's."""
    expected = os.environ.get(_VARIABLE)
    if expected and _own_digest() != expected:
        raise InputError(
            f"worker on {socket.gethostname()} runs other code: expected {expected[:16]}, found "
            f"{_own_digest()[:16]} in {ROOT}; uninstall the copy there, or make it the driver's"
        )


def require_store(directory: str) -> None:
    """Raise `InputError` on a host that does not see a directory which the driver has made."""
    if on_cluster() and storage.is_local(directory) and not storage.exists(directory):
        raise InputError(
            f"worker on {socket.gethostname()} does not see {directory}; the store must be one "
            "that all hosts share: give --prefix gs://bucket/dir, or a shared directory"
        )
