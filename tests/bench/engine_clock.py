"""What a measured process knows of its own time; imported first, standard library only.

The clock starts when this module is imported, which is the first thing a measured script does, and
is read when the interpreter leaves. Its answer goes to the file named in `TOY_CLOCK`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections.abc import Iterator

_START = time.perf_counter()
_imported: list[float] = []


@contextlib.contextmanager
def importing() -> Iterator[None]:
    begun = time.perf_counter()
    yield
    _imported.append(time.perf_counter() - begun)


def _report() -> None:
    if path := os.environ.get("TOY_CLOCK"):
        own = time.perf_counter() - _START
        with open(path, "w") as file:
            json.dump({"own": own, "imported": sum(_imported)}, file)


atexit.register(_report)
