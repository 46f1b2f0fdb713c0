"""How a host finds its place in a slice, what keeps it from joining, and how the head waits."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import types
from typing import Any
from unittest import mock

import pytest

from pipeline import pod
from pipeline.errors import InputError
from pipeline.launch import host as hosts
from pipeline.launch import join, nodes
from pipeline.launch.host import Host
from pipeline.launch.nodes import Hosts

GKE = {
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_ID": "2",
    "TPU_NAME": "slice-0",
}


@pytest.fixture
def facts(monkeypatch):
    """Sets what the environment and the machine's metadata say, which is nothing at first."""

    def say(environment=None, machine=None):
        for name in hosts.VARIABLES.values():
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(hosts, "slice_metadata", lambda: machine or {})

    say()
    return say


def test_a_host_finds_its_place_in_the_environment_or_in_the_machine(facts):
    """GKE's variables, Google's metadata (with its own name for v5e), or what is given."""
    facts(GKE)
    assert hosts.find("", "", "") == Host(pod("v6e-16"), 2, "slice-0")
    assert hosts.find("", "", "").variables == GKE
    facts(machine={"type": "v5litepod-16", "worker id": "3", "name": "node"})
    assert hosts.find("", "", "") == Host(pod("v5e-16"), 3, "node")
    facts(machine={"type": "tpu7x-16", "worker id": "1", "name": "node"})
    assert hosts.find("", "", "") == Host(pod("v7x-16"), 1, "node")
    facts()
    assert hosts.find("v6e-8", "0", "mine") == Host(pod("v6e-8"), 0, "mine")
    assert hosts.find("2x8xh100", "1", "").variables == {}


def test_a_host_finds_which_of_several_slices_it_is_in(facts):
    """Megascale's variables, the machine's metadata, or what is given; each slice has its name."""
    facts(GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"})
    found = hosts.find("", "", "")
    assert found == Host(pod("2xv6e-16"), 2, "slice-0", 1)
    assert (found.index, found.slice_name) == (6, "slice-0-1")
    assert str(found) == "host 6 of 8 of 2xv6e-16"
    assert found.variables == GKE | {"TPU_NAME": "slice-0-1"}
    facts(machine={"type": "v6e-8", "slices": "3", "slice id": "2", "name": "node"})
    assert hosts.find("3xv6e-8", "", "mine") == Host(pod("3xv6e-8"), 0, "mine", 2)


@pytest.mark.parametrize(
    ("environment", "machine", "given", "message"),
    [
        ({}, {}, ("", "", ""), "is neither in TPU_ACCELERATOR_TYPE nor"),
        (GKE, {"type": "v6e-8"}, ("", "", ""), "type differs: v6e-16 by the environment, v6e-8 by"),
        (GKE, {}, ("v6e-32", "", ""), "differs: v6e-32 by the command line, v6e-16 by the envir"),
        ({}, {}, ("v6e-16", "", ""), "expected a worker id from 0 to 3 on v6e-16, found none"),
        ({}, {}, ("v6e-16", "4", ""), "expected a worker id from 0 to 3 on v6e-16, found '4'"),
        ({}, {}, ("2xv6e-16", "0", ""), "expected a slice id from 0 to 1 on 2xv6e-16, found none"),
        ({"MEGASCALE_NUM_SLICES": "4"}, {}, ("2xv6e-16", "0", "", "1"), "slices differs: 2 by"),
    ],
)
def test_wrong_facts_are_refused_in_one_line(facts, environment, machine, given, message):
    """A fact that is missing, impossible or contradicted by another source."""
    facts(environment, machine)
    with pytest.raises(InputError, match=message) as error:
        hosts.find(*given)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_missing_chip_is_named(tmp_path):
    """By the devices that the kernel shows, which may take a while after a boot."""
    host = Host(pod("v6e-16"), 1, "slice")
    for index in range(3):
        (tmp_path / f"accel{index}").touch()
    with pytest.raises(InputError, match=r"host 1 of 4 of v6e-16 .* 4 chips, this machine shows 3"):
        hosts.check_chips(host, str(tmp_path), 0.0)
    threading.Timer(0.2, (tmp_path / "accel3").touch).start()
    hosts.check_chips(host, str(tmp_path))


@pytest.mark.slow
def test_a_metadata_server_that_is_slow_at_boot_is_asked_again(monkeypatch):
    """One that does not answer is not taken for a machine without metadata."""
    machine = {"accelerator-type": "v5litepod-16", "tpu-env": "WORKER_ID: '3'\nNODE_ID: 'n'\n"}
    asked = []

    def answer(server: socket.socket) -> None:
        while len(asked) < 2:
            connection, _ = server.accept()
            asked.append(connection.recv(1000))
            if len(asked) == 2:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(machine).encode())
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        monkeypatch.setattr(hosts, "_METADATA_SECONDS", 0.5)
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")
        found = hosts.slice_metadata()
        thread.join()
    assert {name: value for name, value in found.items() if value} == {
        "type": "v5litepod-16",
        "worker id": "3",
        "name": "n",
    }


def test_ray_sees_the_hosts_of_a_slice():
    """The slice's first host alone has the resource by which a whole slice is asked for."""
    first, second = (Host(pod("v6e-16"), number, "s") for number in (0, 1))
    assert first.resources["TPU-v6e-16-head"] == 1.0
    assert second.resources == {"TPU": 4.0, "s": 1.0, "accelerator_type:TPU-V6E": 1.0}
    assert second.labels["ray.io/tpu-worker-id"] == "1"
    assert Host(pod("2x8xh100"), 1, "s").labels == {hosts.LABEL: "1"}


HOST = Host(pod("v4-16"), 0, "s")
SOFTWARE = {"code": "abc", "jax": "0.10.2", "libtpu": "0.0.40"}


@pytest.mark.parametrize(
    ("other", "ahead", "message"),
    [
        ({"jax": "0.10.1"}, 0.0, ["jax 0.10.1, the head has 0.10.2"]),
        ({"jax": None}, 0.0, ["jax missing, the head has 0.10.2"]),
        ({"libtpu": "0.0.1"}, 0.0, []),
        ({"code": "abd"}, 0.0, ["code abd, the head has abc"]),
        ({}, 75.0, ["its clock is 75 s ahead of the head's"]),
        ({}, -75.0, ["its clock is 75 s behind the head's"]),
        ({}, 2.0, []),
    ],
)
def test_what_differs_from_the_head_is_a_line(other, ahead, message):
    """Another package, code or clock; not the head's libtpu."""
    mine = {name: value for name, value in {**SOFTWARE, **other}.items() if value}
    assert hosts.differences(mine, SOFTWARE, ahead) == message


def test_what_runs_here_is_described():
    """The code, the packages that the project requires, and what computes."""
    assert {"code", "jax", "jaxlib", "ray", "tensorstore"} <= hosts.software()[0].keys()


class Cluster:
    """An imitated cluster: its nodes, what is installed on them, and what they are told."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: dict[str, tuple[int, str]] = {}
        self.answers: dict[str, Any] = {}
        self.silent: set[str] = set()
        self.told: list[tuple[str, Any]] = []
        self.lines: list[str] = []
        self.now = 1000.0
        clock = types.SimpleNamespace(sleep=self.sleep, time=time.time, monotonic=lambda: self.now)
        monkeypatch.setattr(nodes, "time", clock)
        monkeypatch.setattr(nodes, "software", lambda: (SOFTWARE, time.time()))
        monkeypatch.setattr(nodes, "alive", lambda: dict(self.nodes))
        monkeypatch.setattr(nodes, "on_each", self.on_each)
        self.hosts = Hosts(count, self.lines.append)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def on_each(self, names, seconds, function, *given):
        for name in [n for n in names if n not in self.silent]:
            if function is nodes.leave:
                self.told.append((name, *given))
            yield name, self.answers.get(name, (SOFTWARE, time.time()))

    def wait(self, seconds: float, first: float) -> None:
        self.hosts.wait(seconds, first, lambda: None)


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(2, monkeypatch)


def test_hosts_are_welcomed_and_told_the_end(cluster):
    """Each is named once, also one that returns with a new node; the last status is theirs."""
    cluster.nodes = {"a": (0, "vm-0"), "b": (1, "vm-1")}
    cluster.wait(0.0, 0.0)
    assert sorted(cluster.lines) == ["host 0 of 2 joined: vm-0", "host 1 of 2 joined: vm-1"]
    cluster.nodes = {"a": (0, "vm-0"), "c": (1, "vm-1")}
    assert cluster.hosts.problem(1200.0) == ""
    assert cluster.lines[2:] == ["host 1 of 2 joined: vm-1"]
    cluster.hosts.end(3)
    assert sorted(cluster.told) == [("a", 3), ("c", 3)]


def test_waiting_for_the_first_host_has_a_deadline_of_its_own(cluster):
    """Chips that do not exist are waited for longer than hosts of chips that do."""
    with pytest.raises(InputError, match="none of 2 hosts within 600 s"):
        cluster.wait(10.0, 600.0)
    cluster.nodes = {"b": (1, "vm-1")}
    begun = cluster.now
    with pytest.raises(InputError, match="1 of 2 hosts within 10 s of the first; missing: 0"):
        cluster.wait(10.0, 600.0)
    assert cluster.now - begun < 20


def test_a_host_that_comes_and_goes_extends_no_deadline(cluster, monkeypatch):
    """Its machine is billed all the same."""
    there = {"b": (1, "vm-1")}
    monkeypatch.setattr(nodes, "alive", lambda: there if cluster.now % 4 < 2 else {})
    begun = cluster.now
    with pytest.raises(InputError, match="missing"):
        cluster.wait(10.0, 600.0)
    assert cluster.now - begun < 20


def test_two_machines_with_one_number_are_named(cluster):
    """The missing one is there, with the number of another."""
    cluster.nodes = {"a": (1, "vm-0"), "b": (1, "vm-1")}
    with pytest.raises(InputError, match="missing: 0; of the others, 1 is vm-0, 1 is vm-1"):
        cluster.wait(10.0, 600.0)


@pytest.mark.parametrize(
    ("answer", "number", "message"),
    [
        (({"code": "x"}, 0.0), 1, r"host 1 of 2 \(vm\) cannot join: code x, the head has"),
        (ImportError("No module\nnamed 'pipeline'"), 1, "cannot join: No module named 'pipeline'"),
        (None, 2, "expected a number from 0 to 1"),
    ],
)
def test_a_host_that_differs_ends_the_wait_and_the_run(cluster, answer, number, message):
    """At once, since it is billed: in the wait, and when it returns to a run."""
    cluster.nodes = {"b": (number, "vm")}
    cluster.answers = {"b": answer} if answer else {}
    with pytest.raises(InputError, match=message):
        cluster.wait(3600.0, 3600.0)
    with pytest.raises(InputError, match=message):
        raise InputError(cluster.hosts.problem(3600.0))


def test_a_host_that_does_not_answer_has_not_joined(cluster):
    """Its node is there, as after a machine began to hang, until it answers."""
    cluster.nodes = {"a": (0, "vm-0"), "b": (1, "vm-1")}
    cluster.silent = {"b"}
    with pytest.raises(InputError, match="missing: 1"):
        cluster.wait(10.0, 600.0)
    cluster.silent = set()
    cluster.wait(10.0, 600.0)


def test_hosts_wait_for_lost_ones_for_a_limited_time(monkeypatch):
    """Since they are billed; not where no host is left, nor while a whole slice returns."""
    cluster = Cluster(3, monkeypatch)

    def pass_time(seconds: int, *numbers: int) -> str:
        problem = ""
        for _ in range(0, seconds, 30):
            cluster.now += 30
            cluster.nodes = {f"n{n}": (n, f"vm-{n}") for n in numbers}
            problem = cluster.hosts.problem(1200)
        return problem.rpartition(": ")[2]

    assert pass_time(3600, 0, 1, 2) == ""
    assert pass_time(1170, 0, 1) == ""
    assert pass_time(60, 0, 1) == "2"
    assert pass_time(30, 0, 1, 2) == ""
    assert pass_time(9000) == "", "all are gone: nothing is billed"
    assert pass_time(1170, 1) == "", "a slice returns, one host after the other"
    assert pass_time(90, 1, 2) == "0"


def test_a_run_whose_hosts_do_not_return_is_stopped(cluster, monkeypatch):
    """By the SIGTERM after which it saves and ends; its status is the job's."""
    monkeypatch.setattr(join, "_POLL_SECONDS", 0.05)
    cluster.nodes = {"a": (0, "vm-0")}
    ended = join._run(("sleep", "100"), cluster.hosts, -1.0, cluster.lines.append)
    assert ended == 128 + signal.SIGTERM
    assert "error: lost hosts did not return in -1 s: " in cluster.lines[-1]


def test_a_head_that_does_not_answer_is_named():
    """At the deadline, with its address."""
    with pytest.raises(InputError, match=r"no head answers at 127.0.0.1:1 within 0 s"):
        join.follow(("127.0.0.1", 1), HOST, wait=0.0, imitate=True, tell=print)


def test_a_name_that_is_published_late_is_asked_for_again(monkeypatch):
    """As those of pods; one that stays unknown is named."""
    here, asked = socket.getaddrinfo("127.0.0.1", None), []

    def lookup(name: str, _: None) -> Any:
        asked.append(name)
        if name == "never" or len(asked) < 3:
            raise socket.gaierror("no such name")
        return here

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(join, "_POLL_SECONDS", 0.01)
    assert join.is_here("slice-0.svc", 5.0)
    assert len(asked) == 3
    with pytest.raises(InputError, match="cannot resolve the host 'never'"):
        join.is_here("never", 0.05)


@pytest.mark.slow
def test_a_host_whose_ray_ends_joins_again(monkeypatch):
    """By the status on which its supervisor repeats `join`; the line has Ray's last words."""
    lines: list[str] = []
    ray = ["bash", "-c", "echo another Ray; exit 1"]
    monkeypatch.setattr(nodes, "_command", lambda *_, **__: ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = server.getsockname()[:2]
        assert join.follow(head, HOST, wait=5.0, imitate=True, tell=lines.append) == join.LOST
    assert lines[-1] == "error: join: Ray ended on this host: another Ray"


@pytest.mark.slow
def test_a_host_ends_with_the_status_that_the_head_sends(monkeypatch):
    """By the file that the variable names, of which Ray's workers know."""
    ray = ["bash", "-c", f"echo 3 > ${nodes.ENDED}; sleep 99"]
    monkeypatch.setattr(nodes, "_command", lambda *_, **__: ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = server.getsockname()[:2]
        assert join.follow(head, HOST, wait=5.0, imitate=True, tell=print) == 3


@pytest.mark.parametrize(("silent", "status"), [(50, 3), (62, join.LOST)])
def test_a_head_that_is_silent_for_a_minute_is_lost(silent, status, monkeypatch):
    """Whatever Ray makes of it, since the slice is billed; not one that is for a moment."""
    lines: list[str] = []
    now = [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s)
    )
    monkeypatch.setattr(join, "time", clock)
    gone = OSError("gone")
    monkeypatch.setattr(join, "_unreachable", lambda _: gone if 0 < now[0] - 300 < silent else None)
    node = mock.MagicMock(ended=lambda: 3 if now[0] > 500 else None)
    node.__enter__.return_value = node
    monkeypatch.setattr(join, "RayNode", lambda *_, **__: node)
    ended = join.follow(("head", 1), HOST, wait=5.0, imitate=True, tell=lines.append)
    assert ended == status
    assert ("the head did not answer for 60" in lines[-1]) == (status == join.LOST)
