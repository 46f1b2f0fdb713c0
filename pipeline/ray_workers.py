"""Ray as a step's body sees it: shards mapped over tasks, gangs of processes on a slice.

Ray's own retries are off everywhere: a task that kills its worker would be run three times
without anybody knowing. A lost worker is reported once, as `WorkerLost`, and the executor decides.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline import errors
from pipeline.errors import InputError, PonenteError, WorkerLost
from pipeline.hardware import Hardware
from pipeline.inline import InlineWorkers
from pipeline.manifest import Shard
from pipeline.run import Emit, GangProcess, ShardTask, write_shard

_PLACEMENT_SECONDS = 120.0
_IN_FLIGHT_PER_CPU = 2


class _EventSink:
    """Collects events of all workers until the driver asks for them."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def emit(self, event: dict[str, Any]) -> None:
        """Keep one event."""
        self._events.append(event)

    def drain(self) -> list[dict[str, Any]]:
        """All events since the last call, in order of arrival."""
        events, self._events = self._events, []
        return events


def sink_emitter(sink: Any, stamp: Mapping[str, str] | None = None) -> Emit:
    """An emitter that posts to an `EventSink` without waiting, stamped with this machine's time.

    Args:
        sink: the driver's `EventSink`.
        stamp: fields every event gets, such as the step it belongs to.
    """

    def emit(event: dict[str, Any]) -> None:
        sink.emit.remote({"time": time.time(), **event, **(stamp or {})})

    return emit


class _GangProcess:
    """One process of a gang."""

    def coordinator(self) -> str:
        """An address of this host that process 0 can listen on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(
        self,
        function: Callable[..., Any],
        job: Any,
        process: GangProcess,
        sink: Any,
        stamp: Mapping[str, str],
    ) -> tuple[str, Any]:
        """Call the function; errors come back as data, so that no class needs to unpickle."""
        try:
            return "done", function(job, process=process, emit=sink_emitter(sink, stamp))
        except PonenteError as error:
            return type(error).__name__, str(error)
        except Exception:  # noqa: BLE001 - travels back as text and is raised there
            return "error", traceback.format_exc()


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations do not say.
EventSink: Any = ray.remote(num_cpus=0, max_restarts=0)(_EventSink)
_GangActor: Any = ray.remote(max_restarts=0)(_GangProcess)
_write_shard: Any = ray.remote(num_cpus=1, max_retries=0)(write_shard)


class RayWorkers:
    """Workers of a step that itself runs as a Ray task.

    Args:
        sink: the driver's `EventSink`.
        label, key: stamped on events that gang processes emit.
    """

    def __init__(self, sink: Any, label: str, key: str) -> None:
        self._sink = sink
        self._stamp = {"step": label, "key": key}

    def map(self, tasks: list[ShardTask]) -> Iterator[Shard]:
        """Write the shards as tasks of one core each, a bounded number in flight."""
        limit = max(1, int(ray.cluster_resources().get("CPU", 1)) * _IN_FLIGHT_PER_CPU)
        waiting, running = list(reversed(tasks)), {}
        while waiting or running:
            while waiting and len(running) < limit:
                task = waiting.pop()
                running[_write_shard.remote(task)] = task
            ready, _ = ray.wait(list(running), num_returns=1, timeout=None)
            for reference in ready:
                task = running.pop(reference)
                try:
                    yield ray.get(reference)
                except RayTaskError as error:
                    raise _cause(error) from error
                except RayError as error:
                    raise WorkerLost(
                        f"shard {task.name}: its worker died ({_line(error)})"
                    ) from error

    def gang(self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit) -> Any:
        """Run on every process of the hardware at once; process 0's answer."""
        accelerators = _accelerators() if hardware.kind == "local" else {}
        if hardware.kind == "local" and not accelerators:
            return InlineWorkers().gang(hardware, function, job, emit)
        place = _Placement(hardware, accelerators)
        try:
            return self._run_gang(place, hardware, function, job)
        finally:
            place.release()

    def _run_gang(
        self, place: _Placement, hardware: Hardware, function: Callable[..., Any], job: Any
    ) -> Any:
        actors = [place.actor(index) for index in range(hardware.processes)]
        try:
            address = (
                ray.get(actors[0].coordinator.remote(), timeout=_PLACEMENT_SECONDS)
                if hardware.processes > 1
                else None
            )
            job_reference = ray.put(job)
            answers = [
                actor.run.remote(
                    function,
                    job_reference,
                    GangProcess(index, hardware.processes, address),
                    self._sink,
                    self._stamp,
                )
                for index, actor in enumerate(actors)
            ]
            return _collect(answers, hardware)
        finally:
            for actor in actors:
                ray.kill(actor)


def _accelerators() -> dict[str, float]:
    """GPUs and TPU chips of this node; Ray hides them from whoever does not ask."""
    node = ray.get_runtime_context().get_node_id()
    mine = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]
    return {k: v for k, v in (mine[0] if mine else {}).items() if k in ("GPU", "TPU") and v > 0}


class _Placement:
    """Room for a whole gang, reserved all at once or not at all."""

    def __init__(self, hardware: Hardware, accelerators: dict[str, float]) -> None:
        self._hardware = hardware
        self._slice: Any = None
        self._group: Any
        if hardware.kind == "tpu":
            # Ray's slice scheduler knows hosts, heads and topologies; it is imported here
            # because it is alpha and only a TPU run needs it.
            from ray.util.tpu import SlicePlacementGroup

            self._slice = SlicePlacementGroup(
                topology=hardware.topology,
                accelerator_version=hardware.generation,
                chips_per_vm=hardware.devices_per_process,
                head_reservation_timeout_s=_PLACEMENT_SECONDS,
            )
            self._group = self._slice.placement_group
            self._bundle = {"TPU": hardware.devices_per_process}
        else:
            self._bundle = {"CPU": 1, **accelerators}
            self._refuse_if_too_small()
            self._group = placement_group([self._bundle] * hardware.processes, strategy="PACK")
        try:
            ray.get(cast(Any, self._group).ready(), timeout=_PLACEMENT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            self.release()
            raise WorkerLost(
                f"hardware {hardware.name!r}: no room for {hardware.processes} processes within "
                f"{_PLACEMENT_SECONDS:.0f} s; see `ray status`"
            ) from None

    def _refuse_if_too_small(self) -> None:
        there = ray.cluster_resources().get("CPU", 0)
        if there < self._hardware.processes:
            raise InputError(
                f"hardware {self._hardware.name!r} needs {self._hardware.processes} CPUs, one per "
                f"process; this Ray cluster has {there:.0f}"
            )

    def actor(self, index: int) -> Any:
        """Start process `index` in its place, with the environment its devices need."""
        environment = {"PONENTE_GANG": self._hardware.name}
        if self._hardware.kind == "cpu":
            count = self._hardware.devices_per_process
            environment |= {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            }
        resources = {k: v for k, v in self._bundle.items() if k not in ("CPU", "GPU")}
        return _GangActor.options(
            num_cpus=self._bundle.get("CPU", 1),
            num_gpus=self._bundle.get("GPU", 0),
            resources=resources,
            runtime_env={"env_vars": environment},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        ).remote()

    def release(self) -> None:
        """Give the room back."""
        if self._slice is not None:
            self._slice.shutdown()
        else:
            remove_placement_group(self._group)


def _collect(answers: list[Any], hardware: Hardware) -> Any:
    """Wait for all processes; the first failure ends the wait."""
    pending = list(answers)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        index = answers.index(ready[0])
        try:
            status, value = ray.get(ready[0])
        except (RayActorError, WorkerCrashedError, RayError) as error:
            raise WorkerLost(
                f"process {index} of {hardware.processes} on {hardware.name} died ({_line(error)})"
            ) from error
        if status in ("InputError", "DamagedOutput", "WorkerLost"):
            raise getattr(errors, status)(value)
        if status != "done":
            raise PonenteError(
                f"process {index} of {hardware.processes} on {hardware.name}: {value}"
            )
    return ray.get(answers[0])[1]


def _cause(error: RayTaskError) -> BaseException:
    return error.cause if isinstance(error.cause, BaseException) else error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
