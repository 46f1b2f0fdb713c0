"""Generated configurations: as recorded, accepted by the tools' schemas; wrong ones refused."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import pod
from pipeline.cli import launch, options
from pipeline.cli.launch import BACK_ENDS
from pipeline.errors import InputError, UsageError
from pipeline.launch import TARGETS, kuberay, sky
from pipeline.launch import host as hosts
from pipeline.launch.job import Job, Provisioning, job_name
from tests.pipeline.launch import pod_toy
from tests.pipeline.launch.shapes import RAY_JOB, SKY, impossible, refusal

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
ZONE, IMAGE = "us-east5-b", "us-docker.pkg.dev/project/repository/ponente:1"


def job(hardware: str = "v6e-16", **other: Any) -> Job:
    command = ("ponente", "run", "experiments/run_200m.py", "--prefix", "gs://bucket/runs")
    given = {"zone": ZONE, "image": IMAGE, "prefix": "gs://bucket/runs", **other}
    return Job(name="run-200m", hardware=pod(hardware), command=command, code="c0de", **given)


RECORDED = {
    "sky-v6e-16-spot": ("sky", job(spot=True)),
    "sky-2x8xh100": ("sky", job("2x8xh100", zone="")),
    "kuberay-2xv6e-16-spot": ("kuberay", job("2xv6e-16", spot=True)),
    "kuberay-2x8xh100": ("kuberay", job("2x8xh100")),
    "gcluster-v6e-16-spot": ("gcluster", job(spot=True)),
    "gcloud-v6e-16-spot": ("gcloud", job(spot=True)),
    "queued-2xv6e-16": ("queued", job("2xv6e-16")),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_made_is_as_recorded(name):
    """Files, commands and what ends it; a change of these is seen in a diff of these files."""
    on, made_for = RECORDED[name]
    made = BACK_ENDS[on](made_for)
    parts = [f"==> {file}\n{text}" for file, text in made.files.items()]
    parts += ["==> commands", *made.commands, "==> undo", *made.undo]
    parts += ["==> later", *made.after]
    assert "\n".join(parts) + "\n" == (GOLDEN / f"{name}.txt").read_text()


EVERY = [f"{g}-{n}" for g, n in (("v6e", 1), ("v6e", 8), ("v6e", 16), ("v6e", 256), ("v5e", 16))]
EVERY += ["v5p-8", "v5p-32", "v4-16", "2xv6e-16", "3xv6e-8", "8xh100", "2x8xh100", "4x8xb200"]
EVERY += ["v7x-8", "v7x-16", "2xv7x-16"]


@pytest.mark.parametrize("name", EVERY)
def test_every_configuration_fits_the_schemas_and_describes_a_slice_that_exists(name):
    """By what is written down here, and by Ray."""
    wanted = job(name, spot=True)
    slices = wanted.hardware.slices
    by_sky = slices == 1 and wanted.hardware.generation != "v7x"
    made = [(kuberay.provision, RAY_JOB), *([(sky.provision, SKY)] if by_sky else [])]
    for provision, schema in made:
        text = next(t for f, t in provision(wanted).files.items() if f.endswith(".yaml"))
        tree = yaml.safe_load(text)
        assert refusal(tree, schema) == ""
        assert impossible(tree, slices) == ""


def test_one_host_needs_no_policy_and_one_slice_is_a_node():
    """Google's own name of v5e, and its command for each."""
    assert tuple(BACK_ENDS) == TARGETS
    made = BACK_ENDS["gcloud"](job("v5p-8"))
    text = "\n".join([*made.commands, *made.files.values(), *made.after])
    assert "workload-policy" not in text
    assert "resource-policies" not in text
    script = BACK_ENDS["queued"](job("v5e-32")).files["run-200m.head.sh"]
    assert "create run-200m --node-id=run-200m --zone" in script
    assert "--accelerator-type=v5litepod-32 --runtime-version=v2-alpha-tpuv5-lite" in script


def test_v7x_by_its_chips():
    """Google's names, four chips of a host, and Ray's name of the slice on the host itself."""
    made = BACK_ENDS["gcloud"](job("v7x-16"))
    text = "\n".join([*made.commands, *made.files.values()])
    assert "--machine-type=tpu7x-standard-4t" in text
    assert "--accelerator-topology=2x2x2" in text
    (file,) = (t for f, t in kuberay.provision(job("v7x-16")).files.items() if f.endswith(".yaml"))
    assert "google.com/tpu: '4'" in file
    assert "gke-tpu-accelerator: tpu7x" in file
    host = hosts.Host(pod("v7x-16"), 0, "node")
    assert host.variables["TPU_ACCELERATOR_TYPE"] == "tpu7x-16"
    assert host.labels["ray.io/tpu-pod-type"] == "v7x-16"
    assert {
        name: host.resources[name]
        for name in ("TPU", "TPU-v7x-16-head", "accelerator_type:TPU-V7X")
    } == {"TPU": 4.0, "TPU-v7x-16-head": 1.0, "accelerator_type:TPU-V7X": 1.0}


# Of `gcluster job submit` and `job`: cmd/job/submit.go and cmd/job/job.go of cluster-toolkit.
GCLUSTER = """image base-image build-context command compute-type dry-run-out platform mount name
queue num-nodes num-slices restarts gke-ttl-after-finished grace-period
gke-disable-parallel-containers placement-policy node-constraint cpu-affinity restart-on-exit-codes
image-pull-secret service-account topology gke-scheduler await-job-completion timeout priority
verbose gke-nap-provisioning gke-nap-reservation cluster location project"""


@pytest.mark.parametrize("hardware", ["v6e-16", "v6e-8", "v5e-16", "v5p-32", "v4-16"])
def test_a_job_of_the_cluster_toolkit_has_its_flags_and_a_command_that_joins(hardware):
    """Known flags, each once; the pods' shell gives every host the first one's name."""
    made = BACK_ENDS["gcluster"](job(hardware))
    program, *words = shlex.split(made.commands[-1].replace("${CLUSTER:?", "${"))
    assert [program, *words[:2]] == ["gcluster", "job", "submit"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    assert len(flags) == len(words) - 2
    assert flags.keys() <= {*GCLUSTER.split()}
    assert flags["topology"] == pod(hardware).topology
    said = subprocess.run(
        ["bash", "-c", flags["command"].replace("exec .venv/bin/ponente", "printf '%s\\n'", 1)],
        env={"TPU_WORKER_HOSTNAMES": "slice-0.svc,slice-1.svc", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said[:4] == ["join", "slice-0.svc:6380", "--hardware", hardware]
    end = said.index("--")
    assert said[end + 1 :] == [".venv/bin/ponente", *job().command[1:], "--final"]
    launch._parser().parse_args(said[1:end])


@pytest.mark.parametrize(
    ("on", "wrong", "message"),
    [
        ("kuberay", {"image": ""}, "give --image"),
        ("kuberay", {"image": "an image; rm -rf"}, "expected an image"),
        ("gcluster", {"image": ""}, "--on gcluster: give --image"),
        ("gcluster", {"hardware": "8xh100"}, "expected a TPU slice"),
        ("gcluster", {"hardware": "2xv6e-16"}, "makes one slice, 2xv6e-16 is 2"),
        ("gcloud", {"hardware": "v5e-16"}, "use --on queued"),
        ("gcloud", {"hardware": "8xh100"}, "expected a TPU slice"),
        ("gcloud", {"zone": ""}, "give --zone"),
        ("queued", {"zone": "us-east5"}, "expected a zone such as us-east5-b"),
        ("queued", {"hardware": "v7x-8"}, "the Cloud TPU API has no v7x; use --on gcloud"),
        ("sky", {"hardware": "v7x-8"}, "the Cloud TPU API has no v7x; use --on gcloud"),
        ("sky", {"hardware": "2xv6e-16"}, "makes one slice, 2xv6e-16 is 2; use --on queued"),
        ("sky", {"prefix": "./runs"}, "every host must reach the store"),
    ],
)
def test_launches_that_cannot_work_are_refused(on, wrong, message):
    """Before anything is made, with what to do."""
    with pytest.raises(InputError, match=message):
        BACK_ENDS[on](job(**wrong))


@pytest.mark.parametrize(
    ("commands", "left"),
    [
        (("false", "true"), "status 1; nothing was made that costs money"),
        (
            ("true", "false"),
            "status 1; this ends what it made, and any earlier launch of this name: dele",
        ),
    ],
)
def test_a_command_that_fails_says_what_may_cost_money(commands, left):
    """Only the last may have made something; an earlier launch of the name is not to be deleted."""
    made = Provisioning(files={}, commands=commands, needs=(), undo=("delete", "delete more"))
    with pytest.raises(InputError, match=left):
        launch._call(made)


def test_printing_needs_no_flag():
    """Whoever looks for one is told so, and the help names what runs without --go."""
    with pytest.raises(UsageError, match="printing is the default; --go runs the commands"):
        options.parse("launch", ["--print"], pod_toy.experiment, "")
    help = options.parser("launch").format_help()
    assert "--on local needs no --go" in " ".join(help.split())


def test_a_name_fits_every_cloud():
    """Lower case, without what host names do not have, and short."""
    assert job_name("run_200m", "full") == "run-200m"
    assert job_name("My_Sweep", "smoke") == "my-sweep-smoke"
    assert len(job_name("x" * 100, "full")) == 40


@pytest.mark.slow
def test_the_machines_run_what_was_given(typed):
    """Flags of `run`, settings and the store reach the command on the machines."""
    given = ["--only gang", "--keep-going", "--wait 90s", "--no-compile", "--stay True"]
    given += ["--hardware v6e-16", "--shared gs://a/x,gs://c", "--prefix gs://b/x"]
    words = " ".join(given).split()
    status, out, err = typed("launch", pod_toy.__file__, "--on", "sky", *words)
    assert status == 0, err
    run = next(line for line in out.splitlines() if "ponente run" in line)
    assert [each for each in given if each not in run] == []


@pytest.mark.slow
def test_what_the_machines_cannot_have_is_refused(typed, monkeypatch):
    """A store on this machine, and prices of this machine's file."""
    words = ("launch", pod_toy.__file__, "--on", "sky", "--hardware", "v6e-16")
    words += ("--prefix", "gs://b/x")
    status, _, err = typed(*words, "--shared", "gs://a/x,/tmp/team")
    assert status == 1
    assert "/tmp/team is on this machine; give URLs" in err
    monkeypatch.setenv("PONENTE_PRICES", "prices.toml")
    status, _, err = typed(*words, "--budget", "$40")
    assert status == 1
    assert "PONENTE_PRICES names here, so --budget $40 would be another amount" in err
    assert typed(*words, "--budget", "3h")[0] == 0
