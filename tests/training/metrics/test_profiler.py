"""Traces appear when they are asked for, and nothing that goes wrong with one reaches the run."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from training.metrics.profiler import DEFAULT_STEPS, Profiler


@pytest.fixture
def fake(monkeypatch):
    """Stands in for JAX's profiler: what it was asked for."""
    calls = []

    def start(directory, **_):
        calls.append(("start", directory.rpartition("/")[2]))

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", "")))
    return calls


def steps(profiler, first, last):
    for step in range(first, last + 1):
        if profiler.due(step):
            profiler.before(step)


def make(tmp_path, window=None):
    return Profiler(str(tmp_path), window, poll=0.005)


@pytest.mark.parametrize(("length", "more"), [(2, 9), (100, 0)], ids=["in the run", "at its end"])
def test_the_configured_window(tmp_path, fake, length, more):
    """From step 3 on: begun before it, and ended before the step after it or by closing."""
    profiler = make(tmp_path, (3, length))
    steps(profiler, 1, 4)
    assert fake == [("start", "step-00000003")]
    steps(profiler, 5, more)
    assert len(fake) == (2 if more else 1)
    profiler.close()
    assert fake == [("start", "step-00000003"), ("stop", "")]


def test_closing_does_not_wait_for_a_trace_that_takes_long(tmp_path, caplog, fake, monkeypatch):
    """A preempted run has seconds; the trace is lost."""
    written = threading.Event()
    monkeypatch.setattr(jax.profiler, "stop_trace", written.wait)
    profiler = make(tmp_path, (3, 100))
    steps(profiler, 1, 4)
    profiler.close(0.05, 0.05)
    assert not written.is_set()
    assert "the profile may be lost: not written in 0.05 s" in caplog.text
    written.set()


@pytest.mark.parametrize(("content", "count"), [("", DEFAULT_STEPS), ("5", 5), ("7 steps", 7)])
def test_a_file_asks_for_a_trace_once(tmp_path, fake, content, count):
    """It is removed, and so many steps are traced from the next one on."""
    profiler = make(tmp_path)
    (tmp_path / "profile").write_text(content)
    while not profiler.due(11):
        time.sleep(0.005)
    assert not (tmp_path / "profile").exists()
    steps(profiler, 11, 10 + count)
    assert fake == [("start", "step-00000011")]
    steps(profiler, 11 + count, 50)
    profiler.close()
    assert fake[1:] == [("stop", "")]


def test_a_request_that_cannot_be_read_is_said_once(tmp_path, caplog):
    """And the next one is heard."""
    profiler = make(tmp_path)
    for _ in range(2):
        (tmp_path / "profile").write_text("please")
        while (tmp_path / "profile").exists():
            time.sleep(0.005)
    (tmp_path / "profile").write_text("2")
    while not profiler.due(1):
        time.sleep(0.005)
    profiler.close()
    assert caplog.text.count("cannot be read as a request") == 1


@pytest.mark.parametrize("when", ["start_trace", "stop_trace"])
def test_a_profiler_that_fails_is_logged_and_forgotten(tmp_path, caplog, fake, when):
    """The loop continues, and a later request is served."""

    def fail(*_, **__):
        raise RuntimeError("no profiler here")

    profiler = make(tmp_path, (2, 1))
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(jax.profiler, when, fail)
        steps(profiler, 1, 5)
    assert caplog.text.count("no profiler here") >= 1
    (tmp_path / "profile").write_text("1")
    while not profiler.due(7):
        time.sleep(0.005)
    steps(profiler, 7, 9)
    profiler.close()
    assert [name for name, _ in fake][-2:] == ["start", "stop"]


def test_a_real_trace_has_what_xprof_and_perfetto_open(tmp_path):
    square = jax.jit(lambda x: x @ x)
    square(jnp.ones((64, 64))).block_until_ready()
    profiler = Profiler(str(tmp_path), (2, 2), poll=60)
    for step in range(1, 6):
        if profiler.due(step):
            profiler.before(step)
        square(jnp.ones((64, 64))).block_until_ready()
    profiler.close()
    folder = tmp_path / "traces" / "step-00000002"
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert "perfetto_trace.json.gz" in names
    assert any(name.endswith(".xplane.pb") for name in names)
