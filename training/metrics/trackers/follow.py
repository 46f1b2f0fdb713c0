"""The child process of a tracker, which passes the entries of a growing file to the library.

python -m training.metrics.trackers.follow     reads the context, one JSON line, from standard
                                               input; its end means that the file is complete
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterator

from pipeline.errors import InputError
from training.metrics.history import parse
from training.metrics.trackers.backends import BACKENDS, Entry

LOOK_SECONDS = 1.0


def follow(path: str, ended: Callable[[], bool]) -> Iterator[Entry]:
    """The entries of a growing file, as they are appended, without those of kind "time".

    `ended` is called at the end of the file; it waits a while and returns whether that is complete.
    """
    with open(path, "rb") as file:
        last = False
        while True:
            line = file.readline()
            if line.endswith(b"\n"):
                if (entry := parse(line)).get("kind") != "time":
                    yield entry
                continue
            file.seek(-len(line), 1)  # back to the start of an incomplete line
            if last:
                return
            last = ended()


def main() -> None:
    """Follow the file that the context names until the run has ended."""
    context = json.loads(sys.stdin.buffer.readline())
    try:
        BACKENDS[context["kind"]](context, follow(context["path"], _run_ended))
    except InputError as error:
        sys.exit(str(error))


def _run_ended() -> bool:
    return bool(select.select([sys.stdin.buffer], [], [], LOOK_SECONDS)[0])


if __name__ == "__main__":
    main()
