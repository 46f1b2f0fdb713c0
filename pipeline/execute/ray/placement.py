"""Reserving hardware for a whole gang, all or nothing, and waiting for it.

TPU slices are reserved by Ray's own slice scheduler, other hardware by a placement group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline import events
from pipeline.accelerators import GPUS, TPUS
from pipeline.errors import Cancelled, InputError, ResourcesUnavailable
from pipeline.events import Emit
from pipeline.execute.ray import runtime_env
from pipeline.execute.ray.heartbeat import Heartbeat
from pipeline.graph.hardware import Hardware

_POLL_SECONDS = 0.5
_RESERVE_SECONDS = 60.0  # timeout of one try of Ray's slice scheduler
_FIRST_REPORT_SECONDS = 10.0
_REPORT_AT_LEAST_EVERY = 1800.0

logger = logging.getLogger("ponente")


class HardwareWait:
    """A wait for hardware, of at most `limit` seconds if that is given."""

    def __init__(
        self, hardware: Hardware, heartbeat: Heartbeat, emit: Emit, limit: float | None
    ) -> None:
        self._hardware, self._heartbeat, self._emit = hardware, heartbeat, emit
        self._limit = limit
        self._begun = time.monotonic()
        self._report_at = _FIRST_REPORT_SECONDS

    def until(self, done: Callable[[], bool], missing: str) -> None:
        name = self._hardware.name
        while not done():
            seconds = time.monotonic() - self._begun
            if self._heartbeat.stopping:
                raise Cancelled(f"stopped while waiting for {name}")
            if self._limit is not None and seconds >= self._limit:
                raise ResourcesUnavailable(
                    f"hardware {name!r}: {missing} within {self._limit:.0f} s; see `ray status`"
                )
            if seconds >= self._report_at:
                self._report_at = seconds + min(seconds, _REPORT_AT_LEAST_EVERY)
                logger.info("waiting for %s, %.0f s: %s", name, seconds, missing)
                cause = f"waiting for {name}: {missing}"
                self._emit(events.WaitingForResources(cause, seconds))

    def end(self) -> None:
        """Report the end of a wait of which anything was reported: it costs nothing until here."""
        if self._report_at > _FIRST_REPORT_SECONDS:
            seconds = time.monotonic() - self._begun
            cause = f"{self._hardware.name} is there"
            self._emit(events.WaitingForResources(cause, seconds, over=True))


def _actor(
    hardware: Hardware,
    group: Any,
    bundle: Mapping[str, float],
    kind: Any,
    index: int,
    declared: Mapping[str, str],
) -> Any:
    """Start process `index`, an actor of `kind`, with the environment its devices need.

    `declared`: more variables, given to the actor itself: Ray logs its own.
    """
    environment = {"PONENTE_GANG": hardware.name}
    if hardware.kind == "cpu":
        # Appended to the user's flags: of a flag that occurs twice, the last one counts.
        mine = declared.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        count = f"--xla_force_host_platform_device_count={hardware.devices_per_process}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{mine} {count}"}
    return kind.options(
        num_cpus=bundle.get("CPU", 1),
        num_gpus=bundle.get("GPU", 0),
        resources={k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
        runtime_env={"env_vars": environment},
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    ).remote({n: value for n, value in declared.items() if n not in environment})


@contextlib.contextmanager
def placed(
    hardware: Hardware, accelerators: Mapping[str, float], waiting: HardwareWait
) -> Iterator[Callable[..., Any]]:
    """Reserve hardware while the block runs; yields `_actor` on it."""
    with contextlib.ExitStack() as stack:
        group: Any
        if hardware.kind == "tpu":
            reserved = _reserve_slice(hardware, waiting)
            stack.callback(reserved.shutdown)
            group, bundle = reserved.placement_group, {"TPU": hardware.chips_per_process}
        else:
            bundle = {"CPU": 1, **accelerators}
            if hardware.kind == "gpu":
                # With a little of Ray's resource for hosts that have this kind of GPU.
                kind = f"accelerator_type:{GPUS[hardware.generation].ray_type}"
                bundle |= {"GPU": hardware.chips_per_process, kind: 0.001}
            _refuse_if_too_small(hardware, bundle)
            apart = hardware.kind == "gpu" and hardware.processes > 1
            group = placement_group(
                [bundle] * hardware.processes, strategy="STRICT_SPREAD" if apart else "PACK"
            )
            stack.callback(remove_placement_group, group)
        ready = group.ready()
        waiting.until(
            lambda: bool(ray.wait([ready], timeout=_POLL_SECONDS)[0]),
            f"not enough free resources for {hardware.processes} processes",
        )
        waiting.end()
        yield partial(_actor, hardware, group, bundle)


def _refuse_if_too_small(hardware: Hardware, bundle: Mapping[str, float]) -> None:
    if runtime_env.on_cluster():
        return  # hosts may join a cluster; a local Ray never grows
    there = ray.cluster_resources()
    for name, amount in bundle.items():
        if there.get(name, 0) < amount * hardware.processes:
            raise InputError(
                f"hardware {hardware.name!r} needs {amount * hardware.processes:g} {name}, "
                f"{amount:g} per process; this Ray has {there.get(name, 0):g}"
            )


def _reserve_slice(hardware: Hardware, waiting: HardwareWait) -> Any:
    """A slice reserved by Ray's scheduler; its call blocks, so it runs in a thread."""
    many = f"{hardware.slices} free slices" if hardware.slices > 1 else "free slice"
    missing = f"no {many} of topology {hardware.topology}"
    while True:
        tried: Future[Any] = Future()
        threading.Thread(target=_reserve, args=(hardware, tried), daemon=True).start()
        try:
            waiting.until(lambda: bool(wait([tried], _POLL_SECONDS).done), missing)  # noqa: B023
        except BaseException:
            # Given back now, or as soon as it is reserved.
            tried.add_done_callback(lambda late: late.exception() or late.result().shutdown())
            raise
        if not isinstance(tried.exception(), TimeoutError):
            return tried.result()


def _reserve(hardware: Hardware, tried: Future[Any]) -> None:
    """One try of Ray's slice scheduler."""
    # Imported here because the module is alpha, and only a TPU run needs it.
    from ray.util.tpu import SlicePlacementGroup

    hosts = [{"ray.io/tpu-worker-id": str(i)} for i in range(hardware.hosts_per_slice)]
    try:
        reserved = SlicePlacementGroup(
            topology=hardware.topology,
            accelerator_version=TPUS[hardware.generation].ray_name,
            chips_per_vm=hardware.chips_per_process,
            num_slices=hardware.slices,
            # Process i of a slice runs on the slice's host i, in the order of the TPU runtime.
            bundle_label_selector=hosts * hardware.slices if len(hosts) > 1 else None,
            head_reservation_timeout_s=_RESERVE_SECONDS,
        )
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        tried.set_exception(error)
    else:
        tried.set_result(reserved)
