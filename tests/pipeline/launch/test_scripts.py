"""The generated shell, run by bash with imitated tools: whatever fails, chips are given back."""

from __future__ import annotations

import signal

import pytest
import yaml

from pipeline.cli.launch import BACK_ENDS
from tests.pipeline.launch.imitated import Lab
from tests.pipeline.launch.test_back_ends import job

CREATE = ("managed create", "queued-resources create")
DELETE = ("managed delete", "queued-resources delete")
HEAD = "instances delete run-200m-head"


def script(on: str, role: str) -> str:
    return BACK_ENDS[on](job()).files[f"run-200m.{role}.sh"]


def made(lab: Lab) -> int:
    return sum(map(lab.count, CREATE))


@pytest.fixture
def on():
    return "gcloud"


# They differ in the commands about the chips alone.
BOTH = pytest.mark.parametrize("on", ["gcloud", pytest.param("queued", marks=pytest.mark.slow)])


STEPS = {
    "the download": "gcloud storage cp gs:*",
    "the packages": "sudo apt-get*install*",
    "the set-up": "make setup*",
    "the request": "gcloud * create *",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_head_that_fails_before_the_run_rents_nothing(tmp_path, on, step):
    """What it made is deleted, its log is in the store, and it deletes itself last."""
    lab = Lab(tmp_path, 0)
    lab.fail(STEPS[step])
    assert lab.run(script(on, "head")) != 0
    assert not lab.chips
    assert lab.count("ponente") == 0
    assert sum(map(lab.count, DELETE)) == 1
    assert HEAD in lab.calls[-1]
    assert "run-200m is deleted" in lab.log


@pytest.mark.parametrize("status", [0, 75])
def test_a_head_gives_the_chips_back_when_the_run_ends(tmp_path, on, status):
    """After any end of the run, or of the wait for hosts; once a listing lacks them."""
    lab = Lab(tmp_path, status)
    assert lab.run(script(on, "head")) == status
    assert not lab.chips
    calls = lab.calls
    order = [
        next(i for i, call in enumerate(calls) if word in call)
        for word in ("make", "create", "ponente", "delete", HEAD)
    ]
    assert order == sorted(order), "set up before chips are requested; the head last"


@BOTH
def test_one_failure_of_each_step_is_tried_again(tmp_path, on):
    """A package index or a request that fails once does not end the launch."""
    lab = Lab(tmp_path, 0)
    for pattern in STEPS.values():
        lab.fail(pattern, 1)
    assert lab.run(script(on, "head")) == 0
    assert made(lab) == 2
    assert not lab.chips


@BOTH
def test_deleting_is_repeated_until_a_listing_confirms_it(tmp_path, on):
    """A deletion that fails, one that is not done yet, and a listing that fails."""
    lab = Lab(tmp_path, 1)
    lab.fail("gcloud compute *delete run-200m *", 3)
    lab.fail("gcloud compute * list *", 2)
    assert lab.run(script(on, "head")) == 1
    assert not lab.chips
    assert sum(map(lab.count, DELETE)) >= 4
    assert HEAD in lab.calls[-1]


@pytest.mark.slow
def test_a_log_that_cannot_be_sent_keeps_no_chips(tmp_path, on):
    """A request of the store that hangs is given up."""
    lab = Lab(tmp_path, 0)
    (tmp_path / "hangs").touch()
    assert lab.run(script(on, "head").replace("timeout 5m", "timeout 0.3")) == 0
    assert not lab.chips
    assert HEAD in lab.calls[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_head_that_is_stopped_saves_and_gives_the_chips_back(tmp_path, on, number):
    """Its machine may boot again: then it requests chips again, and the run resumes."""
    lab = Lab(tmp_path, "stay", 0)
    assert lab.stopped(script(on, "head"), number) == 143
    assert not lab.chips
    assert lab.calls.index("saved") < lab.calls.index(next(c for c in lab.calls if "delete" in c))
    assert lab.count(HEAD) == 0
    assert lab.run(script(on, "head")) == 0
    assert (made(lab), lab.count("ponente join")) == (2, 2)
    assert not lab.chips


@BOTH
def test_a_head_that_boots_again_goes_on_with_its_chips(tmp_path, on):
    """After a power failure the chips are there, and are not requested a second time."""
    lab = Lab(tmp_path, "stay", 0)
    lab.stopped(script(on, "head"), signal.SIGKILL)
    assert lab.chips
    assert lab.run(script(on, "head")) == 0
    assert (made(lab), lab.count("ponente join")) == (1, 2)
    assert not lab.chips


def test_a_head_that_boots_after_the_end_requests_nothing(tmp_path, on):
    """It only tries again to delete itself."""
    lab = Lab(tmp_path, 0, 0)
    lab.run(script(on, "head"))
    lab.run(script(on, "head"))
    assert (made(lab), lab.count("ponente join"), lab.count(HEAD)) == (1, 1, 2)


@BOTH
def test_chips_that_no_host_joins_from_are_given_back(tmp_path, on):
    """After 40 minutes of there being some, as with an image that lacks the tools of the script.

    While they are only requested, the head waits.
    """
    lab = Lab(tmp_path, "stay")
    (tmp_path / "late").touch()
    lab.fail("gcloud compute * list-instances *", 2)
    lab.fail("gcloud compute * describe *", 2)
    assert lab.run(script(on, "head")) == 130
    assert lab.count("sleep 60") == 2
    assert not lab.chips
    assert "no host joined in time" in lab.log
    assert HEAD in lab.calls[-1]


@BOTH
def test_a_host_joins_again_until_the_run_ends(tmp_path, on):
    """After it lost its Ray or the head (75), and after a signal ended it (137)."""
    lab = Lab(tmp_path, 75, 75, 137, 75, 0)
    (tmp_path / "chips").touch()
    lab.run(script(on, "host"))
    assert lab.count("ponente join") == 5
    assert not lab.chips


@pytest.mark.parametrize("step", ["the download", "the packages", "the set-up"])
def test_a_host_that_cannot_be_set_up_gives_the_slice_back(tmp_path, on, step):
    """Its slice would be billed and could not run; a failure that passes is tried again."""
    lab = Lab(tmp_path, 0)
    (tmp_path / "chips").touch()
    lab.fail(STEPS[step])
    lab.run(script(on, "host"))
    assert lab.count("ponente") == 0
    assert not lab.chips
    assert "failed:" in lab.log


def test_a_host_whose_head_was_killed_gives_the_slice_back(tmp_path, on):
    """No trap of the head ran; `join` lost the head (75) and found none for 20 minutes (1)."""
    lab = Lab(tmp_path, "stay", 75, 1)
    lab.stopped(script(on, "head"), signal.SIGKILL)
    assert lab.chips
    (tmp_path / "opt" / "run-200m.log").unlink()
    lab.run(script(on, "host"))
    assert not lab.chips


def test_a_host_that_reboots_keeps_the_slice_and_joins_again(tmp_path, on):
    """A machine that shuts down sends SIGTERM; the script runs again at the next boot."""
    lab = Lab(tmp_path, "stay", 75, 0)
    (tmp_path / "chips").touch()
    lab.stopped(script(on, "host"), signal.SIGTERM)
    assert lab.chips
    lab.run(script(on, "host"))
    assert lab.count("ponente join") == 3
    assert not lab.chips


@BOTH
def test_only_the_last_command_makes_what_costs_money(tmp_path, on):
    """So a command that fails on the user's machine leaves nothing that is billed."""
    lab = Lab(tmp_path)
    *free, last = BACK_ENDS[on](job()).commands
    lab.run("export TPU_IMAGE_FAMILY=x\n" + "\n".join(free))
    assert not lab.chips
    assert lab.count("instances create") == lab.count("queued-resources create") == 0
    assert "instances create run-200m-head" in last


def sky(part: str) -> str:
    return yaml.safe_load(BACK_ENDS["sky"](job()).files["run-200m.sky.yaml"])[part]


@pytest.mark.parametrize(
    ("statuses", "ends"), [((0,), 0), ((75, 75, 0), 0), ((75, 3), 3), ((130,), 130)]
)
def test_on_skypilot_a_host_joins_again_and_the_job_ends_as_the_run(tmp_path, statuses, ends):
    """A managed job: its controller deletes the machines after any end, also of a set-up."""
    lab = Lab(tmp_path, *statuses)
    (tmp_path / "code.tar.gz").rename(tmp_path / "opt" / "run-200m.code.tar.gz")
    assert lab.run(sky("setup")) == 0
    assert lab.run(f"export SKYPILOT_NODE_IPS=10.0.0.1\n{sky('run')}") == ends
    assert lab.count("ponente join 10.0.0.1:6380") == len(statuses)
    assert BACK_ENDS["sky"](job()).commands[0].startswith("sky jobs launch ")


def test_on_skypilot_a_set_up_that_fails_ends_the_job(tmp_path):
    """Without the code, and with a `make` that fails."""
    lab = Lab(tmp_path)
    assert lab.run(sky("setup")) != 0
    (tmp_path / "code.tar.gz").rename(tmp_path / "opt" / "run-200m.code.tar.gz")
    lab.fail("make setup*")
    assert lab.run(sky("setup")) != 0


def test_on_kubernetes_machines_exist_only_while_there_are_pods(tmp_path):
    """A pool starts without machines, and a finished job has no pods; hosts restart their Ray."""
    made = BACK_ENDS["kuberay"](job("2xv6e-16"))
    lab = Lab(tmp_path)
    lab.fail("gcloud container node-pools describe *")
    lab.fail("kubectl *")
    assert lab.run("set -e\nexport CLUSTER=c\n" + "\n".join(made.commands)) != 0
    pools = [call for call in lab.calls if "node-pools create" in call]
    assert len(pools) == 2
    for words in pools:
        assert "--num-nodes=0 --enable-autoscaling --min-nodes=0 --max-nodes=4" in words
    tree = yaml.safe_load(made.files["run-200m.rayjob.yaml"])["spec"]
    assert tree["shutdownAfterJobFinishes"]
    (group,) = tree["rayClusterSpec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["restartPolicy"] == "Always"
