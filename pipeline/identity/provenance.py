"""Where an output came from: recorded in its manifest, never part of its key."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.identity import source_code

_PACKAGES = (
    *("jax", "jaxlib", "libtpu", "haliax", "equinox", "optax", "orbax-checkpoint"),
    *("tensorstore", "ray", "fsspec", "gcsfs", "pyarrow", "tokenizers", "numpy"),
)


@functools.cache
def _git(directory: str) -> dict[str, str]:
    def ask(*arguments: str) -> str:
        try:
            answer = subprocess.run(
                ["git", "-C", directory, *arguments],
                capture_output=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return answer.stdout.decode(errors="replace").strip()

    diff = ask("diff", "HEAD", "--", "*.py")
    return {
        "commit": ask("rev-parse", "HEAD"),
        "uncommitted": hashlib.sha256(diff.encode()).hexdigest() if diff else "",
    }


@functools.cache
def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def collect(function: Callable[..., Any]) -> dict[str, Any]:
    """Git commit, digest of the uncommitted diff, source digests, versions, machine."""
    return {
        "git": _git(str(Path(__file__).parent)),
        "sources": source_code.digests(function),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": _packages(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "flags": {
            name: os.environ[name]
            for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
            if name in os.environ
        },
        "executable": sys.executable,
    }
