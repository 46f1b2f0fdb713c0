"""Traces of some steps for xprof and Perfetto, requested in the configuration or during a run.

To request one during a run, create a file named `profile` in its directory that contains the number
of steps (3 when it is empty). A thread polls for the file, removes it and sets a number, which is
all that the loop checks. Only the first process of a gang is profiled: the others run the same
program, and a trace of each would be hundreds of files.

A trace is a directory `traces/step-<first>` with `*.xplane.pb` for xprof and TensorBoard's profile
plugin, `perfetto_trace.json.gz` for ui.perfetto.dev, and `parts.json` with the seconds by kind of
work (`training.metrics.profile_parts`). Errors are logged and do not end the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from pipeline.store import storage
from training.metrics.profile_parts import TRACES, write_parts
from training.metrics.trackers import Spool

logger = logging.getLogger(__name__)

REQUEST = "profile"
DEFAULT_STEPS = 3
MOST_STEPS = 100
LOCAL_POLL_SECONDS = 2.0
REMOTE_POLL_SECONDS = 10.0
TRACE_SECONDS = 600.0
"""Longest wait for a trace to be written, at the end of a run that was not preempted."""


class Profiler:
    """Starts and stops traces between steps.

    `directory` gets requests and traces. `window` is (first step, number of steps) to profile
    without a request; a thread looks for requests every `poll` seconds, by default 2 on local disks
    and 10 in a store. The loop sets `program`, which returns the text of the compiled step.
    """

    def __init__(
        self,
        directory: str,
        window: tuple[int, int] | None = None,
        *,
        poll: float | None = None,
    ) -> None:
        self._directory, self._window = directory, window
        self.program: Callable[[], str] | None = None
        self._requested = 0  # steps to profile, set by the thread
        self._first = self._until = 0
        self._spool: Spool | None = None
        self._uploads: list[threading.Thread] = []
        local = storage.is_local(directory)
        self._poll = poll or (LOCAL_POLL_SECONDS if local else REMOTE_POLL_SECONDS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="profile", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Whether `before(step)` has work to do: cheap, and false in nearly every step."""
        if self._spool is not None:
            return step >= self._until
        return self._requested > 0 or (self._window is not None and step == self._window[0])

    def before(self, step: int) -> None:
        """Start or stop a trace before `step` is queued; the step before must have finished."""
        if self._spool is not None and step >= self._until:
            self._end()
        count = self._requested
        if self._window is not None and step == self._window[0]:
            count = max(count, self._window[1])
        if count > 0 and self._spool is None:
            self._requested = 0
            self._begin(step, count)

    def close(self, seconds: float = 15.0, trace_seconds: float = TRACE_SECONDS) -> None:
        """Stop polling, wait for a running trace to be written, then for uploads."""
        self._closed.set()
        self.program = None  # how many steps a trace has that is still running is not known
        if self._spool is not None:
            ending = threading.Thread(target=self._end, name="profile-end", daemon=True)
            ending.start()
            ending.join(trace_seconds)
            if ending.is_alive():
                logger.warning("the profile may be lost: not written in %g s", trace_seconds)
        deadline = time.monotonic() + seconds
        for upload in self._uploads:
            upload.join(max(0.0, deadline - time.monotonic()))

    def _begin(self, step: int, count: int) -> None:
        try:
            url = storage.join(self._directory, TRACES, f"step-{step:08d}")
            self._spool = Spool(url)
            self._first, self._until = step, step + min(count, MOST_STEPS)
            options = jax.profiler.ProfileOptions()
            # A trace of every Python call would hide the steps, and slow them down.
            options.python_tracer_level = 0
            place = str(self._spool.path)
            jax.profiler.start_trace(place, create_perfetto_trace=True, profiler_options=options)
            logger.info("profiling %d steps from step %d to %s", count, step, url)
        except Exception:
            self._spool = None
            logger.warning("step %d: profiling did not start", step, exc_info=True)

    def _end(self) -> None:
        spool, self._spool = self._spool, None
        assert spool is not None, "a trace is running"
        try:
            jax.profiler.stop_trace()
        except Exception:
            logger.warning("the profile to %s was lost", spool.path, exc_info=True)
            return
        # In a thread: the loop must not wait for an upload of hundreds of megabytes.
        given = (spool, self.program, self._until - self._first)
        self._uploads.append(threading.Thread(target=_finish, args=given, daemon=True))
        self._uploads[-1].start()

    def _watch(self) -> None:
        url = storage.join(self._directory, REQUEST)
        warned = False
        while not self._closed.wait(self._poll):
            try:
                if storage.size(url) is not None:
                    words = storage.read_bytes(url).split()
                    storage.delete_tree(url)
                    self._requested = max(1, int(words[0])) if words else DEFAULT_STEPS
            except Exception:
                if not warned:
                    logger.warning("%s: cannot be read as a request", url, exc_info=True)
                warned = True


def _finish(spool: Spool, program: Callable[[], str] | None, steps: int) -> None:
    try:
        if program is not None:
            write_parts(spool.path, program(), steps)
    except Exception:
        logger.warning("%s: its seconds by kind of work are not known", spool.path, exc_info=True)
    try:
        spool.close()
        logger.info("a profile is in %s", spool.path if Path(spool.path).exists() else "the store")
    except Exception:
        logger.warning("the profile in %s was not uploaded", spool.path, exc_info=True)
