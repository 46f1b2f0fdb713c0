"""The TPU compiler, asked in processes of their own: libtpu initializes once in a process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def printed(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    """The JSON lines that `python *arguments` prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
