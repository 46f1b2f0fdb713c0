"""Traces appear when they are asked for, and nothing that goes wrong with one reaches the run."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from training.metrics.profiler import DEFAULT_STEPS, Profiler


class Fake:
    """Stands in for JAX's profiler and keeps what it was told."""

    def __init__(self):
        self.calls = []

    def start(self, directory):
        self.calls.append(("start", directory.rpartition("/")[2]))

    def stop(self):
        self.calls.append(("stop", ""))


def steps(profiler, first, last):
    """What a loop does with a profiler."""
    for step in range(first, last + 1):
        if profiler.due(step):
            profiler.before(step)


def make(tmp_path, fake, window=None, poll=0.005):
    return Profiler(str(tmp_path), window, poll=poll, start=fake.start, stop=fake.stop)


def test_the_configured_window(tmp_path):
    """Steps 3 and 4: begun before 3 and ended before 5."""
    fake = Fake()
    profiler = make(tmp_path, fake, (3, 2))
    steps(profiler, 1, 4)
    assert fake.calls == [("start", "step-00000003")]
    steps(profiler, 5, 9)
    profiler.close()
    assert fake.calls == [("start", "step-00000003"), ("stop", "")]


def test_a_window_at_the_end_is_ended_by_closing(tmp_path):
    """The run ends before the window does."""
    fake = Fake()
    profiler = make(tmp_path, fake, (3, 100))
    steps(profiler, 1, 4)
    profiler.close()
    assert [name for name, _ in fake.calls] == ["start", "stop"]


def test_closing_does_not_wait_for_a_trace_that_takes_long(tmp_path, caplog):
    """A preempted run has seconds; the trace is lost."""
    fake, written = Fake(), threading.Event()
    profiler = Profiler(str(tmp_path), (3, 100), start=fake.start, stop=written.wait)
    steps(profiler, 1, 4)
    profiler.close(0.05, 0.05)
    assert not written.is_set()
    assert "the profile may be lost: not written in 0.05 s" in caplog.text
    written.set()


@pytest.mark.parametrize(("content", "count"), [("", DEFAULT_STEPS), ("5", 5), ("7 steps", 7)])
def test_a_file_asks_for_a_trace_once(tmp_path, content, count):
    """It is removed, and so many steps are traced from the next one on."""
    fake = Fake()
    profiler = make(tmp_path, fake)
    (tmp_path / "profile").write_text(content)
    while not profiler.due(11):
        time.sleep(0.005)
    assert not (tmp_path / "profile").exists()
    steps(profiler, 11, 10 + count)
    assert fake.calls == [("start", "step-00000011")]
    steps(profiler, 11 + count, 50)
    profiler.close()
    assert fake.calls[1:] == [("stop", "")]


def test_a_request_that_cannot_be_read_is_said_once(tmp_path, caplog):
    """And the next one is heard."""
    fake = Fake()
    profiler = make(tmp_path, fake)
    for _ in range(2):
        (tmp_path / "profile").write_text("please")
        while (tmp_path / "profile").exists():
            time.sleep(0.005)
    (tmp_path / "profile").write_text("2")
    while not profiler.due(1):
        time.sleep(0.005)
    profiler.close()
    assert caplog.text.count("cannot be read as a request") == 1


@pytest.mark.parametrize("when", ["start", "stop"])
def test_a_profiler_that_fails_is_logged_and_forgotten(tmp_path, caplog, when):
    """The loop goes on, and a later window still works."""
    fake = Fake()

    def fail(*_):
        raise RuntimeError("no profiler here")

    profiler = make(tmp_path, fake, (2, 1))
    setattr(profiler, f"_{when}", fail)
    steps(profiler, 1, 5)
    profiler.close()
    assert caplog.text.count("no profiler here") >= 1
    setattr(profiler, f"_{when}", getattr(fake, when))
    profiler._window = (7, 1)
    steps(profiler, 6, 9)
    assert [name for name, _ in fake.calls][-2:] == ["start", "stop"]


def test_a_real_trace_has_what_xprof_and_perfetto_open(tmp_path):
    """Two steps of a small matmul."""
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
