"""The same graphs on a real local Ray: equal results, lost workers, gangs of processes."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from typing import Annotated, Any

import pytest

from pipeline import GangProcess, Hardware, Result, Runtime, StepContext, local, pod, step
from pipeline.errors import StepFailed
from pipeline.events import Emit, Progress
from pipeline.execute.ray import gang
from pipeline.graph.step import as_node
from tests.pipeline.helpers import bring_up, check_invariants, run_on
from tests.pipeline.toy import Scale, Total, kill_once, numbers, scaled, total

pytestmark = pytest.mark.slow


def report_process(job: int, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    logging.getLogger(__name__).info("process %d begins", process.index)
    os.write(2, b"from below Python\n")
    emit(Progress(1, 1, "x", str(process.index)))
    return {
        "job": job,
        "index": process.index,
        "count": process.count,
        "coordinator": process.coordinator,
        "flags": os.environ.get("XLA_FLAGS"),
    }


def die_process(job: int, *, process: GangProcess, emit: Emit) -> None:
    """Process 1 dies without a word, process 0 waits for a message that never comes."""
    import signal
    import time

    if process.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@step(output=Total, version=1, cpus=0, tries=2)
def ganged(run: StepContext, *, job: int, hardware: str, dies: bool = False) -> Result:
    return dict(run.gang(pod(hardware), die_process if dies else report_process, job))


class _DiesAtOnce(gang._GangProcess):
    """Is lost between its placement and its first answer."""

    def coordinator(self) -> str:
        os._exit(1)


@step(output=Total, version=1, cpus=0, tries=2)
def failing(run: StepContext) -> Result:
    """Runs a gang that loses process 0 before it begins."""
    import ray

    with pytest.MonkeyPatch.context() as patch:  # other steps use this worker too
        patch.setattr(gang, "_GangActor", ray.remote(max_restarts=0)(_DiesAtOnce))
        return dict(run.gang(pod("cpu-2x1"), report_process, 1))


@pytest.fixture(scope="module")
def backend():
    """One Ray for the whole file: starting it takes seconds."""
    from pipeline.execute.ray.backend import RayBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PONENTE_HEARTBEAT_TIMEOUT", "20")
        started = RayBackend()
        yield started
        started.close()


def test_ray_builds_what_the_inline_executor_builds(tmp_path, backend):
    """Same content, same results, and events of the workers arrive."""
    source = numbers(count=100, shards=5)
    graph = total(source, scaled(source, scale=Scale(3)))
    events = []
    on_ray = run_on(backend, str(tmp_path / "ray"), graph, events=events)
    inline = bring_up(str(tmp_path / "inline"), graph)
    assert {f.manifest.content for f in on_ray.published.values()} == {
        f.manifest.content for f in inline.published.values()
    }
    assert [f.manifest.result for f in on_ray.published.values()] == [
        f.manifest.result for f in inline.published.values()
    ]
    assert check_invariants(str(tmp_path / "ray")) == 3
    assert [e["event"] for e in events].count("shard") == 5


def test_a_step_that_loses_its_worker_is_tried_again(tmp_path, backend):
    """The worker is killed the first time; one retry, counted, and the step succeeds."""
    events = []
    graph = kill_once(numbers(count=4), flag=str(tmp_path / "flag"))
    execution = run_on(backend, str(tmp_path / "store"), graph, events=events)
    assert execution.published[as_node(graph).key].manifest.result["total"] == 6
    assert [e["event"] for e in events].count("retried") == 1


@step(output=Total, version=1, cpus=0)
def compute(
    run: StepContext, *, number: int, hardware: Annotated[Hardware, Runtime] = local()
) -> Result:
    begun = time.monotonic()
    time.sleep(0.5)
    return {"measured": {"from": begun, "to": time.monotonic()}}


def test_of_steps_that_compute_on_this_machine_one_runs_at_a_time(tmp_path, backend):
    """As two trainings of a sweep: else each would slow the other, and a TPU has one owner."""
    wanted = [compute(number=number) for number in range(3)]
    found = run_on(backend, str(tmp_path), *wanted).published.values()
    spans = sorted(tuple(f.manifest.result["measured"].values()) for f in found)
    assert len(spans) == 3
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


@step(output=Total, version=1, cpus=0)
def given(run: StepContext, *, what: Annotated[Any, Runtime]) -> Result:
    """Has an argument that is not in its key, and may be anything."""
    return {"total": 1}


def test_a_step_that_cannot_be_sent_to_a_worker_fails_alone(tmp_path, backend):
    """The other steps are built, and the argument is named."""
    events, graph = [], (given(what=threading.Lock()), total(numbers(count=4)))
    with pytest.raises(StepFailed, match="argument 'what' cannot be sent to a worker"):
        run_on(backend, str(tmp_path), *graph, events=events, keep_going=True)
    ended = {event["step"]: event["event"] for event in events if "step" in event}
    assert (ended["given"], ended["total"]) == ("failed", "finished")


def test_a_gang_of_two_processes_shares_a_coordinator(tmp_path, backend):
    """cpu-2x2: two processes, two virtual devices each, one meeting point."""
    graph = ganged(job=7, hardware="cpu-2x2")
    (said,) = [f.manifest.result for f in run_on(backend, str(tmp_path), graph).published.values()]
    assert (said["job"], said["index"], said["count"]) == (7, 0, 2)
    for index, log in enumerate(sorted(tmp_path.glob("ganged-*/attempts/*/logs/*.txt"))):
        text = log.read_text()
        assert f"INFO {__name__}: process {index} begins" in text
        assert "from below Python" in text
    assert index == 1
    assert ":" in said["coordinator"]
    assert said["flags"].split()[-1] == "--xla_force_host_platform_device_count=2"
    assert set(os.environ["XLA_FLAGS"].split()) < set(said["flags"].split())


def test_a_gang_larger_than_the_cluster_is_refused(tmp_path, backend):
    """The message says what is needed and what is there."""
    with pytest.raises(StepFailed, match="needs 64 CPU, 1 per process; this Ray has"):
        run_on(backend, str(tmp_path), ganged(job=1, hardware="cpu-64x1"))


def test_the_loss_of_one_process_ends_the_gang(tmp_path, backend):
    """The others are not waited for; the step is tried again, then fails naming the process."""
    events = []
    with pytest.raises(StepFailed, match="process 1 of 2 on cpu-2x1 died"):
        run_on(backend, str(tmp_path), ganged(job=1, hardware="cpu-2x1", dies=True), events=events)
    assert [e["event"] for e in events].count("retried") == 1


def test_a_process_that_is_lost_before_it_says_anything_is_tried_again(tmp_path, backend):
    events = []
    with pytest.raises(StepFailed, match="process 0 of 2 on cpu-2x1 was lost before it began"):
        run_on(backend, str(tmp_path), failing(), events=events)
    assert [e["event"] for e in events].count("retried") == 1


def tell_environment(directory: str, item: int) -> dict[str, Any]:
    import ray

    return {"shard": _told(), "resources": ray.get_runtime_context().get_assigned_resources()}


def tell_in_gang(job: int, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    return {"gang": _told(), "flags": os.environ["XLA_FLAGS"].split()}


def _told() -> dict[str, str | None]:
    # Of a secret its length: this is published.
    secret = os.environ.get("TOY_TOKEN")
    return {"FLAG": os.environ.get("TOY_FLAG"), "secret": secret and str(len(secret))}


DECLARED = ("TOY_FLAG", "TOY_TOKEN", "XLA_FLAGS")


@step(output=Total, version=1, cpus=0, shard_cpus=0.5, shard_memory=2**20, environment=DECLARED)
def told(run: StepContext) -> Result:
    (shard,) = run.map(tell_environment, {"all": 1}).values()
    return {"body": _told(), **shard.result, **run.gang(pod("cpu-2x2"), tell_in_gang, 1)}


@step(output=Total, version=1, cpus=0)
def untold(run: StepContext, left: Total) -> Result:
    """What a step that declares nothing sees, after one that does."""
    return {"body": _told()}


def test_variables_that_a_step_declares_reach_its_workers_and_secrets_no_record(
    tmp_path, backend, monkeypatch
):
    """Set after Ray was started, as on a cluster that was there before; shards' resources too."""
    secret = uuid.uuid4().hex
    monkeypatch.setenv("TOY_FLAG", "fast")
    monkeypatch.setenv("TOY_TOKEN", secret)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    first, second = run_on(backend, str(tmp_path), untold(told())).published.values()
    found = first.manifest.result
    given = {"FLAG": "fast", "secret": str(len(secret))}
    assert found["body"] == found["shard"] == found["gang"] == given
    assert found["resources"] == {"CPU": 0.5, "memory": 2**20}
    assert found["flags"] == [
        "--xla_cpu_enable_fast_math=false",
        "--xla_force_host_platform_device_count=2",
    ]
    assert first.manifest.provenance["flags"]["TOY_FLAG"] == "fast"
    assert second.manifest.result["body"] == {"FLAG": None, "secret": None}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]


@step(output=Total, version=1, cpus=0)
def waits(run: StepContext) -> Result:
    """Reports progress until it is cancelled, for a minute at most."""
    for _ in range(600):
        run.progress(1, 2, "x")
        time.sleep(0.1)
        if run.stopping:
            break
    return {"stopping": run.stopping}


def test_a_run_survives_the_death_of_its_collector(tmp_path, backend):
    """Another one is made, the worker finds it, and a cancellation arrives through it."""
    import ray

    seen, wanted = [], waits()

    def listen(event):
        seen.append(event["event"])
        if event["event"] == "progress" and "killed" not in seen:
            ray.kill(backend._collector._actor)
            seen.append("killed")
        elif event["event"] == "progress":
            backend.end(as_node(wanted).key)

    (found,) = run_on(backend, str(tmp_path), wanted, events=listen).published.values()
    assert found.manifest.result["stopping"]
    assert seen.count("started") == 1
    assert "retried" not in seen
