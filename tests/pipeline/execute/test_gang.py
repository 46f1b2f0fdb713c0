"""What becomes of a gang's step when one of its processes fails, is lost, or is cancelled."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from ray import exceptions
from ray.exceptions import ActorDiedError, GetTimeoutError

from pipeline import GangProcess, InputError, Result, Runtime, StepContext, pod, step
from pipeline.errors import (
    Cancelled,
    CorruptOutput,
    PonenteError,
    Preempted,
    ResourcesUnavailable,
    StepFailed,
    StoreUnavailable,
    WorkerLost,
)
from pipeline.events import Emit, Warned
from pipeline.execute.ray import backend as ray_backend
from pipeline.execute.ray import gang, heartbeat
from pipeline.execute.ray.heartbeat import HeartbeatAges
from pipeline.graph.hardware import local
from tests.pipeline.execute import cluster as several
from tests.pipeline.helpers import run_on
from tests.pipeline.toy import Total

TIMEOUT = 60.0
REPORTS = gang.Reports(None, {}, "")
ALWAYS = float("inf")
RESET = ("error", "Traceback:\nRuntimeError: Connection reset by peer\n")
DIED = ActorDiedError()


class Told:
    """Ray and a clock, as the one who waits for a gang sees them.

    Of each process: when it answers, and what or what Ray says instead; when its last beat is heard
    (None if it never began). `fate` is what Ray says later of one that does not answer.
    """

    def __init__(self, answers: list[Any], beats: list[Any], fate: Any = None) -> None:
        self.now, self._fate = 0.0, fate
        self._answers = answers
        self._beats = beats
        self.collector = SimpleNamespace(ask=lambda *_, seconds: self.get("ages"))

    def monotonic(self) -> float:
        return self.now

    def wait(self, pending, num_returns, timeout):
        assert num_returns == 1
        if "fate" in pending:
            return (["fate"], []) if self._fate else ([], pending)
        nearest = min(pending, key=lambda index: self._answers[index][0])
        at = max(self.now, self._answers[nearest][0])
        self.now = min(at, self.now + timeout)
        ready = [nearest] if at <= self.now else []
        return ready, [index for index in pending if index not in ready]

    def get(self, reference, timeout=None):
        if reference == "fate":
            raise self._fate
        if reference == "ages":
            began = {i: last for i, last in enumerate(self._beats) if last is not None}
            ages = {f"g/{i}": max(0.0, self.now - last) for i, last in began.items()}
            return HeartbeatAges(ages, {f"node-{name}": s for name, s in ages.items()})
        answer = self._answers[reference][1]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def collect(monkeypatch):
    """What waiting for these answers and beats ends with, and when on the fake clock."""
    monkeypatch.setenv("PONENTE_HEARTBEAT_TIMEOUT", str(TIMEOUT))

    def run(answers, beats, fate=None):
        told = Told(answers, beats, fate)
        monkeypatch.setattr(gang, "ray", told)
        monkeypatch.setattr(gang, "time", told)
        monkeypatch.setattr(heartbeat, "time", told)
        names = [f"g/{index}" for index in range(len(answers))]
        hardware = pod(f"cpu-{len(answers)}x1")
        try:
            asked = SimpleNamespace(coordinator=SimpleNamespace(remote=lambda: "fate"))
            actors, indices = [asked] * len(answers), list(range(len(answers)))
            found = gang._collect(indices, names, hardware, told.collector, actors)
            return found, told.now
        except PonenteError as error:
            return error, told.now

    return run


HOST_DIED = ActorDiedError()
HOST_DIED.error_msg = "The actor died because its node has died. Node Id: 1"
AWAY = exceptions.ActorUnavailableError("Socket closed", None)


@pytest.mark.parametrize(
    ("answer", "fate", "kind"),
    [
        ((20.0, HOST_DIED), None, Preempted),
        ((20.0, AWAY), None, Preempted),
        ((20.0, AWAY), HOST_DIED, Preempted),
        ((20.0, AWAY), DIED, WorkerLost),
        ((20.0, DIED), HOST_DIED, WorkerLost),
        ((ALWAYS, None), HOST_DIED, Preempted),
        ((ALWAYS, None), DIED, WorkerLost),
        ((ALWAYS, None), None, WorkerLost),
    ],
)
def test_a_host_that_vanishes_is_told_from_a_process_that_crashes_or_hangs(
    collect, answer, fate, kind
):
    """By what Ray learns of it: at once, or only after its heartbeats have stopped."""
    error, _ = collect([(ALWAYS, None), answer], [ALWAYS, 9.0], fate)
    assert type(error) is kind


@pytest.mark.parametrize(
    ("answer", "beats", "cause"),
    [
        ((10.2, DIED), 9.0, "process 1 of 2 on cpu-2x1 died"),
        ((40.0, DIED), 9.0, "process 1 of 2 on cpu-2x1 died"),
        ((40.0, DIED), 11.0, "process 1 of 2 on cpu-2x1 died"),  # its last beat was late
        ((40.0, DIED), None, "process 1 of 2 on cpu-2x1 died"),
        ((ALWAYS, None), 9.0, "process 1 of 2 on cpu-2x1 stopped responding"),
        ((ALWAYS, None), 11.0, "process 1 of 2 on cpu-2x1 stopped responding"),
    ],
)
def test_an_error_that_a_loss_explains_is_a_loss(collect, answer, beats, cause):
    """A survivor's collective fails before anybody notices that its peer is gone."""
    error, _ = collect([(10.0, RESET), answer], [ALWAYS, beats])
    assert type(error) is WorkerLost
    assert str(error).startswith(cause)
    assert "RuntimeError: Connection reset by peer" in str(error)


@pytest.mark.parametrize(
    ("answer", "beats", "until"),
    [
        ((10.1, RESET), ALWAYS, 10.1),
        ((12.0, ("done", 1)), ALWAYS, 12.0),
        ((13.0, ("error", "another")), 9.0, 13.0),
        ((ALWAYS, None), ALWAYS, 10 + TIMEOUT / 4),  # it hangs in a collective, and beats
        ((ALWAYS, None), None, 10 + 2 * TIMEOUT),  # it never began
    ],
)
def test_an_error_that_nothing_explains_stands(collect, answer, beats, until):
    """It is not tried again, and is raised once the others have answered or sent a heartbeat.

    The traceback's last line is the cause; all of it is in the process's log.
    """
    error, ended = collect([(10.0, RESET), answer], [ALWAYS, beats])
    assert type(error) is PonenteError
    assert str(error) == "process 0 of 2 on cpu-2x1: RuntimeError: Connection reset by peer"
    assert ended <= until


@pytest.mark.parametrize(
    "kind",
    [InputError, CorruptOutput, StoreUnavailable, Preempted, ResourcesUnavailable, WorkerLost],
)
def test_an_error_on_purpose_goes_before_what_it_did_to_others(collect, kind):
    """It is raised as what it is when it is heard, with nobody waited for."""
    error, ended = collect([(10.0, RESET), (11.0, (kind.__name__, "words"))], [ALWAYS, ALWAYS])
    assert (type(error), str(error), ended) == (kind, "words", 11.0)


def test_an_error_of_the_system_may_pass(collect):
    """It is raised as one that is tried again, with its process."""
    error, _ = collect([(10.0, RESET), (11.0, ("OSError", "words"))], [ALWAYS, ALWAYS])
    assert (type(error), str(error)) == (StoreUnavailable, "process 1 of 2 on cpu-2x1: words")


def test_the_answer_is_that_of_process_0(collect):
    assert collect([(10.0, ("done", "a")), (90.0, ("done", "b"))], [ALWAYS] * 2) == ("a", 90.0)


class NotThere(InputError):
    """A refusal with a name of its own."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotThere("x"), "InputError"),
        (StoreUnavailable("x"), "StoreUnavailable"),
        (ResourcesUnavailable("x"), "ResourcesUnavailable"),
        (Preempted("x"), "Preempted"),
        (PonenteError("x"), "PonenteError"),
        (ConnectionResetError("x"), "OSError"),
        (FileNotFoundError("x"), "error"),
        (ValueError("x"), "error"),
    ],
)
def test_an_error_travels_as_what_the_executor_distinguishes(error, status):
    """As text, so that no class needs to be there where it is read."""

    def fail():
        raise error

    said, text = gang._answer(fail)
    assert said == status
    assert text == "x" if isinstance(error, PonenteError) else text.startswith("Traceback")


def test_a_cancellation_is_not_lost_before_training(monkeypatch):
    """It arrives while the step looks for accelerators, before `on_stop` is set."""
    beating = SimpleNamespace(stopping=False, on_stop=None, name="x")

    def accelerators():
        beating.stopping = True
        return {}

    monkeypatch.setattr(gang, "_accelerators", accelerators)
    called = []
    with pytest.raises(Cancelled):
        gang.run_gang(local(), lambda *_, **__: called.append(1), 1, print, REPORTS, beating)
    assert called == []
    assert beating.on_stop is None


def test_a_ray_that_does_not_start_is_started_again_and_then_one_line(monkeypatch):
    tried = []

    def start_once(address):
        tried.append(address)
        raise RuntimeError("The current node timed out during startup.\nThis could happen")

    monkeypatch.setattr(ray_backend, "_start_once", start_once)
    monkeypatch.setattr(ray_backend, "_START_PAUSE_SECONDS", 0.0)
    with pytest.raises(InputError, match=r"timed out during startup.*--executor inline") as e:
        ray_backend._start(None)
    assert "\n" not in str(e.value)
    assert len(tried) == 3


def test_a_collector_that_does_not_answer_holds_up_no_driver(monkeypatch):
    """Events are none until it answers, asked for once; cancelling does not wait for it."""
    called, answers, cancelled = [], [], []

    def wait(references, timeout):
        return (references, []) if answers else ([], references)

    def get(reference, timeout=None):
        if not answers:
            raise GetTimeoutError(reference)
        return answers.pop()

    def send(*arguments):
        called.append(arguments)
        return "drain"

    backend = object.__new__(ray_backend.RayBackend)
    ray = SimpleNamespace(wait=wait, get=get, cancel=cancelled.append)
    monkeypatch.setattr(ray_backend, "ray", ray)
    backend._watch = SimpleNamespace(has_begun=lambda name: name == "numbers-0")
    backend._collector = SimpleNamespace(send=send)
    backend._drain, backend._ages, backend._stopped = None, None, set()
    running = ray_backend._Running(SimpleNamespace(key="k"), "numbers-0", 0.0)
    queued = ray_backend._Running(SimpleNamespace(key="q"), "numbers-1", 0.0)
    backend._running = {"reference": running, "queued": queued}
    assert backend.events() == backend.events() == []
    backend.end("another")
    backend.end("k")
    assert called == [("drain", ())]
    answers.append(([{"event": "started"}], HeartbeatAges()))
    assert backend.events() == [{"event": "started"}]
    assert backend.events() == []
    assert called[1:] == [("drain", ("numbers-0",))]
    backend.stop()
    assert backend._stopped == {"numbers-0", ""}
    assert cancelled == ["queued"]


def add_up(job: dict[str, str], *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """Sums over both hosts, again and again; the first time, one host is lost in the middle."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from steps.gang import joined

    joined(process).__enter__()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    added = jax.jit(lambda x: x * 0 + jnp.sum(x), out_shardings=sharding)
    numbers = jax.make_array_from_process_local_data(sharding, np.ones(1, np.float32))
    lost, flag = ray.get_runtime_context().get_node_id() != job["stays"], Path(job["flag"])
    for count in range(10):
        numbers = added(numbers).block_until_ready()
        if count == 5 and lost and not flag.exists():
            flag.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    return {"sum": float(numbers.addressable_shards[0].data[0])}


@step(output=Total, version=1, cpus=0, custom={"room": 0.1}, tries=1)
def added_up(run: StepContext, *, job: Annotated[dict[str, str], Runtime]) -> Result:
    return dict(run.gang(pod("cpu-2x1"), add_up, job))


@pytest.mark.slow
def test_a_lost_host_is_tried_again(tmp_path, monkeypatch):
    """Its peer's collective fails at once; the step is tried again elsewhere and ends well."""
    from pipeline.execute.ray.backend import RayBackend

    monkeypatch.setenv("PYTHONPATH", str(several.ROOT))
    cluster, causes = several.start(), []
    several.add(cluster, cpus=0)  # the body's
    several.add(cluster, cpus=1, resources={})

    def listen(event):
        if event["event"] == "retried":
            causes.append(event["cause"])
            several.add(cluster, cpus=1, resources={})

    backend = RayBackend(cluster.address)
    try:
        job = {"stays": cluster.head_node.node_id, "flag": str(tmp_path / "flag")}
        execution = run_on(backend, str(tmp_path / "s"), added_up(job=job), events=listen)
    finally:
        backend.close()
        cluster.shutdown()
    (found,) = execution.published.values()
    assert found.manifest.result["sum"] == 2**10
    assert len(causes) == 1
    assert "process 0 of 2 on cpu-2x1" in causes[0] or "process 1 of 2 on cpu-2x1" in causes[0]


def see_gpus(job: None, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    import ray

    node = ray.get_runtime_context().get_node_id()
    emit(Warned(f"{node} {os.environ['CUDA_VISIBLE_DEVICES']}"))
    print(f"printed by process {process.index}")  # noqa: T201 - is what is tried
    return {"count": process.count, "coordinator": process.coordinator}


@step(output=Total, version=1, cpus=0)
def seen(run: StepContext, *, hardware: str) -> Result:
    return dict(run.gang(pod(hardware), see_gpus, None))


@pytest.mark.slow
def test_gpus_of_several_hosts_are_one_gang(tmp_path, monkeypatch):
    """A process on each host that has the kind, with all GPUs asked for; imitated resources."""
    from pipeline.execute.ray.backend import RayBackend

    monkeypatch.setenv("PYTHONPATH", str(several.ROOT))
    cluster, events = several.start(), []
    for _ in range(2):
        several.add(cluster, cpus=1, num_gpus=2, resources={"accelerator_type:H100": 1})
    several.add(cluster, cpus=1, num_gpus=2, resources={"accelerator_type:A100": 1})
    backend = RayBackend(cluster.address, wait=5)
    try:
        graph = seen(hardware="2x2xh100")
        execution = run_on(backend, str(tmp_path / "s"), graph, events=events)
        with pytest.raises(StepFailed, match="free resources for 3 processes within 5 s"):
            run_on(backend, str(tmp_path / "t"), seen(hardware="3x2xh100"), wait=5)
    finally:
        backend.close()
        cluster.shutdown()
    (found,) = execution.published.values()
    assert found.manifest.result["count"] == 2
    assert ":" in found.manifest.result["coordinator"]
    places = [e["message"].split() for e in events if e["event"] == "warning"]
    assert len({node for node, _ in places}) == 2
    assert [gpus for _, gpus in places] == ["0,1", "0,1"]
    said = [(e["step"], e["text"]) for e in events if e["event"] == "output"]
    assert said == [("seen", "printed by process 0")], "what the others print is in their logs"
