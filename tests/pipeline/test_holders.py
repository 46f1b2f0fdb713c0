"""Who holds a chip, libtpu's lock file or a port is named, with what to do."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from pipeline import doctor, holders, pod
from pipeline.errors import InputError
from pipeline.launch import host as hosts
from pipeline.launch import join

HOLD = "import sys; files = [open(p) for p in sys.argv[1:]]; print('open', flush=True); input()"


@pytest.fixture
def hold():
    """Starts processes that have files open; returns their pids."""
    started = []

    def start(*paths):
        command = [sys.executable, "-c", HOLD, *map(str, paths)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"open\n"
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.communicate(b"\n")


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "vfio").mkdir()
    for name in ("0", "1", "2", "3", "vfio"):
        (tmp_path / "vfio" / name).touch()
    return tmp_path


def chips(machine):
    return holders.chips(str(machine), str(machine / "libtpu_lockfile"))


def test_who_holds_chips_is_named_once(machine, hold):
    """By pid; what only this process has open is not held, nor is the container's device."""
    assert chips(machine) == []
    with open(machine / "vfio/3"), open(machine / "vfio/vfio"):
        assert chips(machine) == []
        pid = hold(machine / "vfio/0", machine / "vfio/1", machine / "vfio/vfio")
        (found,) = chips(machine)
    assert found.found.startswith(f"{machine}/vfio/0, {machine}/vfio/1: held by ")
    assert f"(pid {pid}, of " in found.found
    assert found.advice.startswith("end it, or let its run end")


def test_a_lock_file_that_a_killed_process_left_is_removed(machine, hold):
    held, left = machine / "held", machine / "left"
    for path in (held, left):
        path.touch()
    hold(held)
    for path in (held, left, machine / "none"):
        holders.unlock(str(path))
    assert [path.exists() for path in (held, left)] == [True, False]


def test_a_holder_that_cannot_be_seen_is_known_by_its_refusal(machine, monkeypatch):
    """A process of another container or user: the kernel says EBUSY."""
    real = os.open

    def busy(path, *flags, **more):
        if path == f"{machine}/vfio/2":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        return real(path, *flags, **more)

    monkeypatch.setattr(holders.os, "open", busy)
    (found,) = chips(machine)
    assert "vfio/2: held by a process that this user cannot see" in found.found
    assert f"sudo lsof -w {machine}/vfio/2" in found.advice


def test_a_lock_file_that_was_left_is_none_in_use(machine, hold):
    lock = machine / "libtpu_lockfile"
    lock.touch()
    (found,) = chips(machine)
    assert (found.found, found.advice) == (
        f"{lock}: left by a process that was killed",
        f"sudo rm {lock}",
    )
    hold(lock, machine / "vfio/0")
    (found,) = chips(machine)
    assert "rm" not in found.advice.split()


def test_who_listens_on_a_port_is_named():
    """And what the port is for; a port that only connects is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        found = holders.port(number)
        assert found.found.startswith(f"port {number}: in use by ")
        assert f"(pid {os.getpid()}, of " in found.found
        with socket.create_connection(("127.0.0.1", number)) as client:
            assert holders.port(client.getsockname()[1]) is None
    assert holders.port(number) is None


def test_the_doctor_and_join_say_it(machine, hold, monkeypatch):
    pid = hold(machine / "vfio/0")
    host = hosts.Host(pod("v6e-16"), 1, "slice")
    with pytest.raises(InputError, match=rf"cannot join: .*vfio/0: held by .*pid {pid}.* end it"):
        hosts.check_chips(host, str(machine), 0.0)
    monkeypatch.setattr(holders.chips, "__defaults__", (str(machine), str(machine / "lock")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        monkeypatch.setattr(holders, "PORTS", {number: "Ray"})
        found = doctor.held("")
        assert found.status == "warn"
        assert f"pid {pid}" in found.found
        assert f"port {number} (Ray): in use by" in found.found
        more = {"run": [], "wait": 1.0, "queue": 1.0, "imitate": True, "tell": print}
        with pytest.raises(InputError, match=f"join: port {number} .*in use by .*HEAD:PORT"):
            join.lead(("127.0.0.1", number), None, 1, **more)
    monkeypatch.setattr(holders.chips, "__defaults__", (str(machine / "none"), "none"))
    assert doctor.held("").status == "ok"
