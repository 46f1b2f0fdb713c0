"""The doctor on the network: a hub and a cluster that answer, are closed, or are no address."""

from __future__ import annotations

import http.server
import os
import socket
import threading

import pytest

from pipeline.doctor import examine, network
from pipeline.doctor.finding import Check


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No setting of the machine reaches a check; nobody's home is looked into."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "HF_", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class _Hub(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_HEAD(self):
        self.server.methods.append(self.command)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """A hub on this machine; `status` is what it answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.status, server.methods = 200, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def closed_port():
    """A port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


@pytest.mark.parametrize(("status", "expected"), [(200, "ok"), (401, "ok"), (503, "warn")])
def test_a_hub_that_answers(hub, status, expected, monkeypatch):
    """Any answer but a failure of its own is an answer; one HEAD request is all it costs."""
    hub.status = status
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}/")
    assert network.hub("").status == expected
    assert hub.methods == ["HEAD"]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{}", "not a url", "http://[bad"])
def test_a_hub_that_does_not_answer_is_a_warning(endpoint, closed_port, monkeypatch):
    """A run on local documents needs no hub."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint.format(closed_port))
    finding = network.hub("")
    assert finding.status == "warn"
    assert "HF_ENDPOINT" in finding.advice


def test_an_offline_hub_is_not_asked(hub, monkeypatch):
    """HF_HUB_OFFLINE means no request."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = network.hub("")
    assert finding.status == "ok"
    assert "HF_HUB_OFFLINE" in finding.found
    assert hub.methods == []


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_listens_and_one_that_does_not(form, closed_port, monkeypatch):
    """A connection is opened, no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", form.format(server.getsockname()[1]))
        assert network.cluster("").status == "ok"
    monkeypatch.setenv("RAY_ADDRESS", form.format(closed_port))
    finding = network.cluster("")
    assert finding.status == "fail"
    assert "refused" in finding.found


@pytest.mark.parametrize("address", ["host:port", "://", "ftp://a:1", ":6379", "127.0.0.1:70000"])
def test_an_address_that_is_none_fails(address, monkeypatch):
    """Not a traceback."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    findings = examine("x", [Check("cluster", network.cluster)])
    assert findings[0].status == "fail"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1:6379", "10.0.0.1", 6379),
        ("ray://head:10001", "head", 10001),
        ("ray://head", "head", 10001),
        ("head", "head", 6379),
        ("[::1]:6379", "::1", 6379),
        ("https://head:8265/api", "head", 8265),
    ],
)
def test_ray_addresses(address, host, port):
    """Host and port of each form Ray takes."""
    assert network._endpoint(address) == (host, port)


@pytest.mark.parametrize(
    ("mode", "variable", "file", "says", "hint"),
    [
        ("", False, False, "without a token", False),
        ("", True, False, "token of RAY_AUTH_TOKEN", False),
        ("", False, True, "token of ~/.ray/auth_token", False),
        ("token", False, False, "there is none", True),
        ("token", False, True, "token of", False),
        ("disabled", False, False, "disabled", False),
        ("disabled", True, False, "disabled", True),
        ("both", False, False, "unknown mode", True),
    ],
)
def test_rays_authentication(mode, variable, file, says, hint, monkeypatch, tmp_path):
    """Mode and token that do not go together are pointed out; the token is not shown."""
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if variable:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "very-secret-token")
    if file:
        (tmp_path / "home/.ray").mkdir(parents=True)
        (tmp_path / "home/.ray/auth_token").write_text("very-secret-token")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    finding = network.cluster("")
    assert says in finding.found
    assert (finding.status == "warn") == hint
    assert "very-secret" not in finding.found + finding.advice


def test_without_an_address_no_cluster_is_asked():
    """Ray starts here."""
    assert network.cluster("").status == "ok"


@pytest.mark.slow
def test_ray_is_asked_in_a_process_of_its_own():
    """Its version."""
    finding = network.ray("")
    assert finding.status == "ok"
    assert finding.found.count(".") == 2


def test_a_ray_that_does_not_import_fails(monkeypatch):
    """With the last line of what Python said."""
    monkeypatch.setattr(network, "ask", lambda *_: (1, "", "Traceback\nImportError: libray\n"))
    finding = network.ray("")
    assert finding.status == "fail"
    assert finding.found.endswith("ImportError: libray")
