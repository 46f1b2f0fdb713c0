"""The toy graphs as an experiment file that is measured: `python -m tests.bench.engine_ours`.

The clock starts when this module is executed, and is read when the interpreter leaves. What it
says goes to the file named in `TOY_CLOCK`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path

_START = time.perf_counter()


def _report(imported: float) -> None:
    if path := os.environ.get("TOY_CLOCK"):
        own = time.perf_counter() - _START
        Path(path).write_text(json.dumps({"own": own, "imported": imported}))


def _main() -> None:
    begun = time.perf_counter()
    from tests.bench.engine_graphs import experiment

    atexit.register(_report, time.perf_counter() - begun)
    experiment.main()


if __name__ == "__main__":
    _main()
