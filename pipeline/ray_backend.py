"""Requests as Ray tasks. Ray is started, or joined, when the first step has to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.attempt import Outcome, Request, execute
from pipeline.errors import InputError

_POLL_SECONDS = 0.2
_OBJECT_STORE_BYTES = 256 * 2**20


def _start(address: str | None) -> None:
    import ray

    # Both are read when Ray starts; a user's own setting wins.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        ray.init(include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **quiet)
        return
    root = Path(__file__).parents[1]
    excludes = ["/runs/", "/.venv/", "/.git/", "/tests/", "/docs/"]
    try:
        ray.init(address, runtime_env={"working_dir": str(root), "excludes": excludes}, **quiet)
    except ConnectionError as error:
        raise InputError(f"no Ray cluster answers at {address!r}: {error}") from error


class RayBackend:
    """Executes requests as tasks of a local Ray, or of the cluster at `address`."""

    def __init__(self, address: str | None = None) -> None:
        _start(address)
        import ray

        from pipeline.ray_workers import EventSink, RayWorkers, sink_emitter

        @ray.remote(max_retries=0)
        def run_step(request: Request, sink: Any) -> Outcome:
            workers = RayWorkers(sink, request.label, request.key)
            return execute(request, sink_emitter(sink), workers)

        self._ray = ray
        self._run_step = run_step
        self._sink: Any = EventSink.remote()
        self._running: dict[Any, Request] = {}

    def submit(self, request: Request) -> None:
        """Start the step as a task with the cores its body asked for."""
        reference = self._run_step.options(num_cpus=request.step.cpus, name=request.label).remote(
            request, self._sink
        )
        self._running[reference] = request

    def poll(self) -> list[tuple[Request, Outcome]]:
        """Outcomes of tasks that ended; a task whose worker died is a transient failure."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
        return [(self._running.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            line = " ".join(str(error).split())[:300]
            return Outcome("failed", cause=f"its worker died ({line})", transient=True)

    def events(self) -> list[dict[str, Any]]:
        """Events of all workers since the last call."""
        return self._ray.get(self._sink.drain.remote())

    def close(self) -> None:
        """Leave Ray; a local Ray ends, with everything that runs in it."""
        self._ray.shutdown()
