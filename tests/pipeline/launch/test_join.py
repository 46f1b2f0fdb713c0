"""How a host finds its place in a slice, what keeps it from joining, and how hosts meet."""

from __future__ import annotations

import copy
import http.client
import signal
import socket
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from pipeline import pod
from pipeline.errors import InputError
from pipeline.launch import host as hosts
from pipeline.launch import join, meeting, metadata
from pipeline.launch.host import Host
from pipeline.launch.join import Joining
from pipeline.launch.meeting import Head, Meeting
from pipeline.launch.ray_node import labels, resources

GKE = {
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_ID": "2",
    "TPU_NAME": "slice-0",
}
SOFTWARE = {"python": "3.11.7", "packages": {"jax": "0.10.2", "libtpu": "0.0.40"}, "code": "abc"}


@pytest.fixture
def facts(monkeypatch):
    """Sets what the environment and the machine's metadata say, which is nothing at first."""

    def say(environment=None, machine=None):
        for name in (*GKE, "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(metadata, "known", lambda: machine or {})

    say()
    return say


def test_a_host_finds_its_place_in_the_environment_or_in_the_machine(facts):
    """GKE's variables, Google's metadata (with its own name for v5e), or what is given."""
    facts(GKE)
    assert hosts.find("", "", "") == Host(pod("v6e-16"), 2, "slice-0")
    assert hosts.find("", "", "").variables == GKE
    facts(machine={"type": "v5litepod-16", "worker id": "3", "name": "node"})
    assert hosts.find("", "", "") == Host(pod("v5e-16"), 3, "node")
    facts()
    assert hosts.find("v6e-8", "0", "mine") == Host(pod("v6e-8"), 0, "mine")
    assert hosts.find("v6e-1", "", "").worker == 0
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
    facts()
    assert hosts.find("2xv6e-16", "3", "", "0").index == 3


@pytest.mark.parametrize(
    ("environment", "machine", "given", "message"),
    [
        ({}, {}, ("", "", ""), "is neither in TPU_ACCELERATOR_TYPE nor"),
        (GKE, {"type": "v6e-8"}, ("", "", ""), "type differs: v6e-16 by the environment, v6e-8 by"),
        (GKE, {}, ("v6e-32", "", ""), "differs: v6e-32 by the command line, v6e-16 by the envir"),
        (GKE, {"worker id": "1"}, ("", "", ""), "worker id differs: 2 by the environment, 1 by"),
        ({}, {}, ("v6e-16", "", ""), "expected a worker id from 0 to 3 on v6e-16, found none"),
        ({}, {}, ("v6e-16", "4", ""), "expected a worker id from 0 to 3 on v6e-16, found '4'"),
        ({}, {}, ("v6e-17", "0", ""), "expected one of v6e-1"),
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


def test_a_missing_chip_is_named(tmp_path):
    """By the devices that the kernel shows, which may take a while after a boot."""
    host = Host(pod("v6e-16"), 1, "slice")
    for index in range(3):
        (tmp_path / f"accel{index}").touch()
    with pytest.raises(InputError, match=r"host 1 of 4 of v6e-16 .* 4 chips, this machine shows 3"):
        hosts.check_chips(host, str(tmp_path), 0.0)
    threading.Timer(0.2, (tmp_path / "accel3").touch).start()
    hosts.check_chips(host, str(tmp_path))


@pytest.mark.parametrize(
    ("part", "value", "ahead", "message"),
    [
        ("python", "3.12.1", 0.0, ["Python 3.12.1, the head has 3.11.7"]),
        ("python", "3.11.9", 0.0, []),
        ("packages", {"jax": "0.10.1"}, 0.0, ["jax 0.10.1, the head has 0.10.2"]),
        ("packages", {}, 0.0, ["jax missing, the head has 0.10.2"]),
        ("packages", {"jax": "0.10.2", "libtpu": "0.0.1"}, 0.0, []),
        ("code", "abd", 0.0, ["code abd, the head has abc"]),
        ("code", "abc", 75.0, ["its clock is 75 s ahead of the head's"]),
        ("code", "abc", -75.0, ["its clock is 75 s behind the head's"]),
        ("code", "abc", 2.0, []),
    ],
)
def test_what_differs_from_the_head_is_a_line(part, value, ahead, message):
    """Another minor Python, package, code or clock; not a patch release, not the head's libtpu."""
    mine = {**copy.deepcopy(SOFTWARE), part: value}
    assert hosts.differences(mine, SOFTWARE, ahead) == message


def test_a_metadata_server_that_is_slow_at_boot_is_asked_again(monkeypatch):
    """One that does not answer is not taken for a machine without metadata."""
    asked = []

    def answer(server: socket.socket) -> None:
        while len(asked) < 2:
            connection, _ = server.accept()
            asked.append(connection.recv(1000))
            if len(asked) == 2:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nv6e-16\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        monkeypatch.setattr(metadata, "_SECONDS", 0.5)
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")
        assert metadata.attribute("accelerator-type") == "v6e-16"
        thread.join()


def test_what_runs_here_differs_from_nothing():
    """The real versions and the real digest of the code, twice."""
    mine = hosts.software()
    assert {"jax", "ray", "tensorstore"} <= mine["packages"].keys()
    assert hosts.differences(mine, hosts.software(), 0.0) == []


def test_ray_sees_the_hosts_of_a_slice():
    """The slice's first host alone has the resource by which a whole slice is asked for."""
    first, second = (Host(pod("v6e-16"), number, "s") for number in (0, 1))
    assert resources(first)["TPU-v6e-16-head"] == 1.0
    assert resources(second) == {"TPU": 4.0, "s": 1.0, "accelerator_type:TPU-V6E": 1.0}
    assert labels(second)["ray.io/tpu-worker-id"] == "1"
    assert labels(Host(pod("2x8xh100"), 1, "s")) == {}


@pytest.fixture
def met():
    """A meeting of two hosts with a secret, what it printed, and a host's way to it."""
    lines: list[str] = []
    head = Meeting(("127.0.0.1", 0), SOFTWARE, 2, lines.append, "secret")
    yield head, lines, Head(("127.0.0.1", head.port), "secret")
    head.end(0, seconds=0.0)


def test_hosts_meet_and_learn_the_end(met, monkeypatch):
    """Each takes what the head runs, reports, and gets the run's exit status."""
    monkeypatch.setattr(meeting, "POLL_SECONDS", 0.02)
    head, lines, host = met
    found, ahead = host.facts(5.0)
    assert {name: found[name] for name in SOFTWARE} == SOFTWARE
    assert abs(ahead) < 2.0
    ended: list[int] = []

    def stay(worker: int) -> None:
        ended.append(host.until_ended(worker, f"process {worker}", lambda: None))

    threads = [threading.Thread(target=stay, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    head.wait(5.0, 5.0)
    head.end(3, seconds=5.0)
    for thread in threads:
        thread.join(5.0)
    assert ended == [3, 3]
    assert sorted(lines) == [f"host {n} of 2 joined: process {n}" for n in (0, 1)]


def test_who_is_missing_is_named_with_the_cause(met):
    """At the deadline: one that did not answer, or the reason it gave."""
    head, _, host = met
    host.report(0, "a")
    with pytest.raises(InputError, match="1 of 2 hosts within 0 s of the first; host 1 did not"):
        head.wait(0.0, 0.0)
    host.report(1, "b", "host 1 cannot join: code abd, the head has abc")
    with pytest.raises(InputError, match=r"1 of 2 .* code abd, the head has abc"):
        head.wait(0.0, 0.0)
    assert host.report(2, "c")["cause"] == "worker id 2 is not one of 2"


def test_waiting_for_the_first_host_has_a_deadline_of_its_own(met):
    """Chips that do not exist are waited for longer than hosts of chips that do.

    A host that cannot join exists, and is billed.
    """
    head, _, host = met
    with pytest.raises(InputError, match="none of 2 hosts within 0 s"):
        head.wait(3600.0, 0.0)
    host.report(1, "b", "host 1 cannot join: code abd, the head has abc")
    with pytest.raises(InputError, match="0 of 2 hosts within 0 s of the first; host 0 did not"):
        head.wait(0.0, 3600.0)


def test_hosts_wait_for_lost_ones_for_a_limited_time(monkeypatch):
    """Since they are billed; not where no host is left, nor while a whole slice returns."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(meeting, "time", clock)
    head = Meeting(("127.0.0.1", 0), SOFTWARE, 3, lambda line: None)

    def pass_time(seconds: int, *workers: int) -> str:
        for _ in range(0, seconds, 30):
            now[0] += 30
            for worker in workers:
                assert head.hear(worker, f"vm-{worker} (1)", "")["cause"] == ""
        return head.stranded(1200)

    assert pass_time(3600, 0, 1, 2) == ""
    assert pass_time(1170, 0, 1) == ""
    assert pass_time(60, 0, 1) == "2"
    assert pass_time(30, 0, 1, 2) == ""
    assert pass_time(9000) == "", "all are gone: nothing is billed"
    assert pass_time(1170, 1) == "", "a slice returns, one host after the other"
    assert pass_time(90, 1, 2) == "0"
    head.end(0, seconds=0.0)


def test_a_machine_that_returns_is_welcomed_and_another_one_waits(met):
    """With a new process within seconds, as after a reboot; another machine while it is heard."""
    head, _, host = met
    assert host.report(1, "vm-1 (812)")["cause"] == ""
    assert host.report(1, "vm-1 (977)")["cause"] == ""
    assert host.report(1, "vm-10 (977)")["cause"] == (
        "worker id 1 is that of another host, vm-1 (977)"
    )
    host.report(0, "vm-0 (1)")
    head.wait(0.0, 0.0)


def arguments(port: int, tell: Callable[[str], None], **more: Any) -> Joining:
    """Those of `join` on host 0 of two, whose meeting is at a port."""
    return Joining(
        head=("127.0.0.1", port - 1),
        role="host",
        hosts=2,
        host=Host(pod("v4-16"), 0, "s"),
        queue=5.0,
        imitate=True,
        secret="secret",
        tell=tell,
        **more,
    )


def test_a_host_whose_number_is_taken_tries_again(met):
    """Its `join` ends with the status that restarts it, since the other may be lost."""
    head, lines, host = met
    head._software = hosts.software()
    host.report(0, "another (1)")
    assert join.join(arguments(head.port, lines.append, wait=5.0, run=())) == join.LOST
    assert "cannot join yet: worker id 0 is that of another host, another (1)" in lines[-1]


def test_a_run_whose_hosts_do_not_return_is_stopped(met, monkeypatch):
    """By the SIGTERM after which it saves and ends; its status is the job's."""
    monkeypatch.setattr(join, "_LOOK_SECONDS", 0.05)
    head, lines, host = met
    host.report(0, "vm-0 (1)")
    joining = arguments(head.port, lines.append, wait=0.0, run=("sleep", "100"))
    assert join._run(joining, head) == 128 + signal.SIGTERM
    assert "error: lost hosts did not return in 0 s: " in lines[-1]


def test_a_lost_host_is_replaced(met, monkeypatch):
    """Another process takes its number once it has been silent for long enough."""
    _, _, host = met
    assert host.report(0, "old")["cause"] == ""
    monkeypatch.setattr(meeting, "LOST_SECONDS", 0.0)
    time.sleep(0.01)
    assert host.report(0, "new")["cause"] == ""


@pytest.mark.parametrize("length", ["-1", "many", "2"])
def test_a_malformed_report_is_refused(met, length):
    """A length that is none, and a body that is no report: status 400, at once."""
    head, _, host = met
    connection = http.client.HTTPConnection("127.0.0.1", head.port, timeout=5)
    headers = {"Authorization": "Bearer secret", "Content-Length": length}
    connection.request("POST", "/", b"{}", headers)
    assert connection.getresponse().status == 400
    connection.close()
    assert host.report(0, "a")["cause"] == ""


def test_without_the_secret_the_head_answers_nothing(met):
    """And says what to give."""
    head, _, _ = met
    with pytest.raises(InputError, match="another secret; give all hosts the same --shared"):
        Head(("127.0.0.1", head.port), "wrong").facts(5.0)
    with pytest.raises(InputError, match=r"no head answers at 127.0.0.1:1 within 0 s"):
        Head(("127.0.0.1", 1)).facts(0.0)
