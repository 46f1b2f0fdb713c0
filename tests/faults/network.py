"""A store or a source that cannot be reached, is not permitted, or is busy: fault 52.

Every trial runs the command line against a store or a source that cannot be used, and expects one
line that says so, soon; or a cancellation to be heard while a request is retried.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.network_graph import EXPERIMENT
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.cli.terminal import Terminal

# Ten seconds and two on a quiet machine.
REFUSED_SECONDS = 30.0
CANCELLED_SECONDS = 10.0
_VERBS = ("run", "plan", "status", "plan fetched", "show fetched", "logs fetched", "verify", "gc")


@dataclass(frozen=True)
class Case:
    """What cannot be used, and by which verb.

    Attributes:
        how: unresolved, refused, forbidden (403) or missing (404).
        verb: with its step.
    """

    how: str
    verb: str


CASES = (
    *(Case(how, verb) for how in ("unresolved", "refused", "forbidden") for verb in _VERBS),
    Case("missing", "run"),
)


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """The address of a server that gives the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _store(how: str) -> Iterator[str]:
    """The address of an object store that cannot be used."""
    if how == "unresolved":
        yield "http://store.invalid:4443"
    elif how == "refused":
        yield "http://127.0.0.1:9"
    else:
        with answering({"forbidden": 403, "missing": 404}[how]) as address:
            yield address


def _command(folder: Path, verb: str, *flags: str) -> list[str]:
    folder.mkdir(parents=True)
    (folder / "fetch.py").write_text(EXPERIMENT)
    return [sys.executable, str(folder / "fetch.py"), *verb.split(), *flags]


def refuse(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """The verb ends with status 1 and one line, and says what cannot be reached."""
    longest = 0.0

    def trial(number: int) -> None:
        nonlocal longest
        case, folder = CASES[pick(number, len(CASES))], workspace / f"trial-{number}"
        with _store(case.how) as address:
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            environment["STORAGE_EMULATOR_HOST"] = address
            begun = time.monotonic()
            done = subprocess.run(
                _command(folder, case.verb, "--prefix", "gs://bucket/runs", *_inline(case.verb)),
                capture_output=True,
                text=True,
                env=environment,
                timeout=REFUSED_SECONDS,
                check=False,
            )
            longest = max(longest, time.monotonic() - begun)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 1, f"{case}: exit {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{case}: {done.stderr}"
        assert len(errors) == 1, f"{case}: {done.stderr}"
        assert "gs://bucket" in errors[0], f"{case}: {errors}"

    return {"trials": trials(seed, count, trial), "seconds_max": round(longest, 1)}


def _cancel(executor: str) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        longest = 0.0

        def trial(number: int) -> None:
            nonlocal longest
            folder = workspace / f"trial-{number}"
            store = str(folder / "store")
            command = _command(folder, "run", "--prefix", store, "--executor", executor)
            with answering(503) as address:
                environment = {"PONENTE_ADDRESS": f"{address}/file.parquet"}
                with Terminal(command, environment, tty=False) as terminal:
                    limit = time.monotonic() + 120
                    while "retrying: " not in terminal.text:
                        assert time.monotonic() < limit, terminal.text
                        assert terminal.process.poll() is None, terminal.text
                        time.sleep(0.05)
                    begun = time.monotonic()
                    terminal.terminate()
                    status = terminal.wait(CANCELLED_SECONDS)
                    longest = max(longest, time.monotonic() - begun)
            assert status == 143, f"exit {status}: {terminal.text}"
            assert "Traceback" not in terminal.text, terminal.text

        made = trials(seed, count, trial)
        return {"trials": made, "executor": executor, "seconds_max": round(longest, 1)}

    return run


FAULTS = {
    52: [
        Fault("a store out of reach or not permitted", 4, len(CASES), refuse),
        Fault("kill while a source is retried, in this process", 1, 5, _cancel("inline")),
        Fault("kill while a source is retried, on Ray", 1, 5, _cancel("ray")),
    ]
}


def _inline(verb: str) -> tuple[str, ...]:
    """What has a run start no Ray; other verbs start none."""
    return ("--executor", "inline") if verb == "run" else ()
