"""Trackers of a run, each a child process that follows `metrics.jsonl` as the run writes it.

A tracker cannot slow down or end the run, which sends it no metrics and does not wait for it. The
libraries are optional extras; they start threads, catch signals and wait for uploads at exit, all
in the child. It gets its context as a JSON line on standard input, which the run's end, also by a
kill, closes: the child reads the file to the end and exits. One that ends before its run has
failed, and the last line of its standard error is the reason. Destination and credentials come from
the environment variables that the libraries document: WANDB_API_KEY, WANDB_ENTITY, WANDB_PROJECT,
WANDB_MODE, TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import importlib
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pipeline.errors import InputError
from pipeline.store import storage
from training.config.train import INSTALL, TRACKERS, check_trackers
from training.metrics.metrics_log import Entry, parse

logger = logging.getLogger(__name__)

UPLOAD_SECONDS = 30.0


class Spool:
    """A directory to write to, `path`, and its copy at a URL."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url, self._clock = url, clock
        self._remote = not storage.is_local(url)
        self._sizes: dict[Path, int] = {}
        self._next = clock() + UPLOAD_SECONDS
        place = tempfile.mkdtemp(prefix="ponente-") if self._remote else storage.local_path(url)
        self.path = Path(place)
        self.path.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        """Upload what grew, at most every 30 seconds; errors of the store are logged."""
        if not self._remote or self._clock() < self._next:
            return
        try:
            self._upload()
        except OSError as error:
            logger.warning("%s: not uploaded, will be retried: %s", self._url, error)
        self._next = self._clock() + UPLOAD_SECONDS

    def close(self) -> None:
        """Upload the rest and delete the temporary copy, which an `OSError` leaves."""
        if self._remote:
            self._upload()
            shutil.rmtree(self.path, ignore_errors=True)

    def _upload(self) -> None:
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and self._sizes.get(path) != path.stat().st_size:
                data = path.read_bytes()
                name = path.relative_to(self.path).as_posix()
                storage.write_atomic(storage.join(self._url, name), data)
                self._sizes[path] = len(data)


Entries = Iterable[Entry]
PROJECT = "ponente"
_NOT_METRICS = ("kind", "time", "step", "split")


def scalars(entry: Entry) -> dict[str, float]:
    """The numbers of an entry under the trackers' names, such as "train/loss" and "web/loss"."""
    groups = {"step": "train", "evaluation": entry.get("split", "validation")}
    group = groups.get(entry["kind"], entry["kind"])
    return {
        f"{group}/{name}": float(value)
        for name, value in entry.items()
        if name not in _NOT_METRICS and isinstance(value, int | float) and entry["kind"] != "config"
    }


def _library(tracker: str) -> Any:
    try:
        return importlib.import_module(TRACKERS[tracker])
    except ImportError as error:
        raise InputError(f"{error}; {INSTALL.format(tracker)}") from error


def tensorboard(context: Mapping[str, Any], entries: Entries) -> None:
    """Event files in `<shared>/tensorboard`, of all attempts: scalars, and samples as text.

    Each attempt replaces the steps after the checkpoint that it resumed from.
    """
    writer_of = _library("tensorboard").SummaryWriter
    spool = Spool(storage.join(context["shared"], "tensorboard"))
    writer: Any = None
    for entry in entries:
        if entry["kind"] == "config":
            continue
        step, when = entry.get("step", 0), entry["time"]
        if writer is None:
            purge = step + (entry["kind"] == "began")
            writer = writer_of(logdir=str(spool.path), flush_secs=10, purge_step=purge)
        for name, value in scalars(entry).items():
            writer.add_scalar(name, value, step, walltime=when)
        if entry["kind"] == "sample":
            name = sample_name(entry["prompt"])
            writer.add_text(name, entry["completion"], step, walltime=when)
        spool.sync()
    if writer is not None:
        writer.close()
    spool.close()


def wandb(context: Mapping[str, Any], entries: Entries) -> None:
    """One W&B run for all attempts; the step is a metric, so redone steps are logged too."""
    library = _library("wandb")
    directory = context["directory"]
    run = library.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=_run_id(context),
        name=context["run"],
        resume="allow",
        config=dict(context["config"]),
        dir=storage.local_path(directory) if storage.is_local(directory) else None,
        # Upload no output, code or git data: the URL of a git remote may contain a token.
        settings=library.Settings(
            console="off", disable_git=True, disable_code=True, disable_job_creation=True
        ),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    for entry in entries:
        values: dict[str, Any] = scalars(entry)
        if entry["kind"] == "sample":
            text = html.escape(entry["prompt"] + entry["completion"])
            values[sample_name(entry["prompt"])] = library.Html(f"<pre>{text}</pre>")
        if values:
            run.log({"step": entry.get("step", 0), **values})
    run.finish()


def trackio(context: Mapping[str, Any], entries: Entries) -> None:
    """A trackio run in a local database, or in the Hugging Face space of TRACKIO_SPACE_ID."""
    run = _library("trackio").init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=_run_id(context),
        config=dict(context["config"]),
        resume="allow",
        embed=False,
    )
    for entry in entries:
        if values := scalars(entry):
            run.log(values, step=entry.get("step", 0))
    run.finish()


BACKENDS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def sample_name(prompt: str) -> str:
    """The name of a prompt's samples; its digest tells prompts apart that read alike in ASCII."""
    name = _identifier(prompt[:48])
    digest = "" if name == prompt else f"-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"
    return f"samples/{name}{digest}"


def _run_id(context: Mapping[str, Any]) -> str:
    """An id that all attempts of a run share; a rebuild of the run has another."""
    return _identifier("-".join(filter(None, (context["run"], context.get("build")))))


def _identifier(run: str) -> str:
    """`run` as an id that the services accept: ASCII letters, digits, `_.-`, at most 64."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in run)[-64:]


class Trackers:
    """The trackers `names` of one attempt.

    `context` has JSON values that every child gets: `directory` (URL for its files, this attempt's
    own), `shared` (the same for all attempts of the build), `run` (name of the run), `build` (tells
    its attempts from those of an earlier run of that name), `config` (without environment
    variables) and `path` (the metrics log).
    """

    def __init__(
        self,
        names: Sequence[str],
        context: Mapping[str, Any],
        command: Sequence[str] = (sys.executable, "-m", "training.metrics.trackers"),
    ) -> None:
        check_trackers("trackers", names)
        self._reported: set[str] = set()
        self._closing = False
        self._errors: dict[str, IO[bytes]] = {}
        self._children = {name: self._start(name, context, command) for name in names}

    def _start(
        self, name: str, context: Mapping[str, Any], command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        self._errors[name] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors[name],
            # Ctrl-C and a job's end signal only the run's process group; the run ends the child.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"kind": name, **context}, default=str).encode() + b"\n")
            child.stdin.flush()
        except OSError:  # the child has ended, which `failures` reports
            logger.debug("tracker %s did not read its context", name, exc_info=True)
        return child

    def failures(self) -> list[str]:
        """A message for each tracker that failed since the last call."""
        found = []
        for name, child in self._children.items():
            if name not in self._reported and child.poll() is not None:
                if child.returncode or not self._closing:
                    reason = self._last_error(name, child.returncode)
                    found.append(f"tracker {name} is off, the run continues without it: {reason}")
                self._reported.add(name)
        return found

    def close(self, seconds: float) -> list[str]:
        """Wait up to `seconds` for all children, kill the rest; returns the last `failures`."""
        deadline, self._closing = time.monotonic() + seconds, True
        for child in self._children.values():
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the child ended and left input unread
                child.stdin.close()
        for name, child in self._children.items():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("tracker %s: not done in time, killed", name)
                self._reported.add(name)
                child.kill()
                child.wait()
        found = self.failures()
        for file in self._errors.values():
            file.close()
        return found

    def _last_error(self, name: str, status: int) -> str:
        self._errors[name].seek(0)
        text = self._errors[name].read().decode(errors="replace").strip()
        last = text.split("\n")[-1].strip()[:500]
        return last or f"its process ended with status {status}"


LOOK_SECONDS = 1.0


def follow(path: str, ended: Callable[[], bool]) -> Iterator[Entry]:
    """The entries of a growing file, as they are appended, without those of kind "time".

    `ended` is called at its end, waits a while and returns whether the file is complete.
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
    context = json.loads(sys.stdin.buffer.readline())
    try:
        BACKENDS[context["kind"]](context, follow(context["path"], _run_ended))
    except InputError as error:
        sys.exit(str(error))


def _run_ended() -> bool:
    return bool(select.select([sys.stdin.buffer], [], [], LOOK_SECONDS)[0])


if __name__ == "__main__":
    main()
