"""Generated configurations: as recorded, accepted by the tools' schemas; wrong ones refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import pod
from pipeline.cli import launch, options
from pipeline.errors import InputError, UsageError
from pipeline.launch import kuberay, sky
from pipeline.launch.job import Job, Recipe, job_name
from pipeline.launch.targets import RECIPES
from tests.pipeline.launch import pod_toy, tool_schemas
from tests.pipeline.launch.shapes import RAY_JOB, SKY, impossible, refusal

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
ZONE, IMAGE = "us-east5-b", "us-docker.pkg.dev/project/repository/ponente:1"


def job(hardware: str = "v6e-16", **other: Any) -> Job:
    """A launch of some experiment."""
    command = ("ponente", "run", "experiments/run_200m.py", "--prefix", "gs://bucket/runs")
    given = {"zone": ZONE, "image": IMAGE, "prefix": "gs://bucket/runs", **other}
    return Job(name="run-200m", hardware=pod(hardware), command=command, code="c0de", **given)


RECORDED = {
    "sky-v6e-16-spot": ("sky", job(spot=True)),
    "sky-2x8xh100": ("sky", job("2x8xh100", zone="")),
    "kuberay-v6e-16-spot": ("kuberay", job(spot=True)),
    "kuberay-2x8xh100": ("kuberay", job("2x8xh100")),
    "gcloud-v6e-16-spot": ("gcloud", job(spot=True)),
    "gcloud-v5p-8": ("gcloud", job("v5p-8")),
    "queued-v5e-32": ("queued", job("v5e-32")),
    "queued-2xv6e-16": ("queued", job("2xv6e-16")),
    "kuberay-2xv6e-16": ("kuberay", job("2xv6e-16")),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recipes_are_as_recorded(name):
    """Files, commands and what ends it; a change of these is seen in a diff of these files."""
    on, made_for = RECORDED[name]
    recipe = RECIPES[on](made_for)
    parts = [f"==> {file}\n{text}" for file, text in recipe.files.items()]
    parts += ["==> commands", *recipe.commands, "==> undo", *recipe.undo]
    parts += ["==> later", *recipe.after]
    assert "\n".join(parts) + "\n" == (GOLDEN / f"{name}.txt").read_text()


EVERY = [f"{g}-{n}" for g, n in (("v6e", 1), ("v6e", 8), ("v6e", 16), ("v6e", 256), ("v5e", 16))]
EVERY += ["v5p-8", "v5p-32", "v4-16", "2xv6e-16", "3xv6e-8", "8xh100", "2x8xh100", "4x8xb200"]


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_every_configuration_fits_the_schemas_and_describes_a_slice_that_exists(name, spot):
    """By what is written down here, by the tools' own schemas where they are, and by Ray."""
    wanted = job(name, spot=spot)
    for recipe, schema, own in (
        (sky.recipe, SKY, tool_schemas.skypilot()),
        (kuberay.recipe, RAY_JOB, tool_schemas.kuberay()),
    ):
        if recipe is sky.recipe and wanted.hardware.slices > 1:
            continue  # refused
        text = next(t for f, t in recipe(wanted).files.items() if f.endswith(".yaml"))
        tree = yaml.safe_load(text)
        assert refusal(tree, schema) == ""
        assert impossible(tree, wanted.hardware.slices) == ""
        assert own is None or refusal(tree, own) == ""


GROUP = ("spec", "rayClusterSpec", "workerGroupSpecs", 0)
HOST = (*GROUP, "template", "spec", "containers", 0)
LIMITS, NODES = (*HOST, "resources", "limits"), (*GROUP, "template", "spec", "nodeSelector")
ARGUMENTS = ("resources", "accelerator_args")
# (made by, where, the wrong value)
WRONG = [
    (sky.task, ("resource",), {}),
    (sky.task, ("num_node",), 4),
    (sky.task, ("setup",), ["make setup"]),
    (sky.task, ("file_mounts",), ["launch/run-200m.code.tar.gz"]),
    (sky.task, ("resources", "spot"), True),
    (sky.task, ("resources", "use_spot"), "yes"),
    (sky.task, ("resources", "infra"), "gpc/us-east5"),
    (sky.task, ("resources", "infra"), 5),
    (sky.task, (*ARGUMENTS, "queued_resource"), True),
    (sky.task, (*ARGUMENTS, "runtime_version"), 2),
    (sky.task, ("resources", "job_recovery", "max_restarts"), 3),
    (sky.task, ("resources", "accelerators"), "tpu-v6e-17x"),
    (kuberay.ray_job, (*GROUP, "numOfHost"), 4),
    (kuberay.ray_job, (*GROUP, "numOfHosts"), "4"),
    (kuberay.ray_job, (*GROUP, "numOfHosts"), 2),
    (kuberay.ray_job, (*GROUP, "replicas"), 4),
    (kuberay.ray_job, (*LIMITS, "google.com/tpu"), "8"),
    (kuberay.ray_job, (*NODES, "cloud.google.com/gke-tpu-topology"), "4x5"),
    (kuberay.ray_job, (*NODES, "cloud.google.com/gke-tpu-topology"), "4x8"),
    (kuberay.ray_job, (*HOST, "images"), IMAGE),
    (kuberay.ray_job, (*HOST, "ports", 0, "containerPort"), "8081"),
    (kuberay.ray_job, ("spec", "entryPoint"), "python"),
    (kuberay.ray_job, ("spec", "backoffLimit"), "two"),
]


@pytest.mark.parametrize(("made_by", "where", "value"), WRONG)
def test_wrong_configurations_are_refused(made_by, where, value):
    """A typo, a wrong type, a wrong count of hosts, a topology that does not exist."""
    tree = copy.deepcopy(made_by(job(spot=True)))
    *way, last = where
    part = tree
    for name in way:
        part = part[name]
    part[last] = value
    of_sky = made_by is sky.task
    refused = refusal(tree, SKY if of_sky else RAY_JOB)
    assert refused or impossible(tree)
    own = tool_schemas.skypilot() if of_sky else tool_schemas.kuberay()
    if own is not None and refused:
        assert refusal(tree, own)


@pytest.mark.parametrize(
    ("on", "wrong", "message"),
    [
        ("kuberay", {"image": ""}, "give --image"),
        ("kuberay", {"zone": ""}, "give --zone"),
        ("kuberay", {"image": "an image; rm -rf"}, "expected an image"),
        ("gcloud", {"hardware": "v5e-16"}, "use --on queued"),
        ("gcloud", {"hardware": "8xh100"}, "expected a TPU slice"),
        ("gcloud", {"zone": ""}, "give --zone"),
        ("queued", {"zone": "us-east5"}, "expected a zone such as us-east5-b"),
        ("queued", {"zone": "us-east5-b; reboot"}, "expected a zone"),
        ("sky", {"hardware": "2xv6e-16"}, "makes one slice, 2xv6e-16 is 2; use --on queued"),
        ("gcloud", {"hardware": "2xv6e-16"}, "makes one slice"),
        ("sky", {"prefix": "./runs"}, "every host must reach the store"),
        ("sky", {"hardware": "v6e-17"}, "expected one of v6e-1"),
    ],
)
def test_launches_that_cannot_work_are_refused(on, wrong, message):
    """Before anything is made, with what to do."""
    with pytest.raises(InputError, match=message):
        RECIPES[on](job(**wrong))


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
    recipe = Recipe(files={}, commands=commands, needs=(), undo=("delete", "delete more"))
    with pytest.raises(InputError, match=left):
        launch._call(recipe)


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
def test_the_machines_run_what_was_given():
    """Flags of `run`, settings and the store reach the command on the machines."""
    launch = [sys.executable, "-m", "pipeline.cli", "launch", pod_toy.__file__, "--on", "sky"]
    given = ["--only", "gang", "--keep-going", "--wait", "90s", "--no-compile", "--stay", "True"]
    store = ["--hardware", "v6e-16", "--prefix", "gs://b/x"]
    shown = subprocess.run([*launch, *given, *store], capture_output=True, text=True, timeout=60)
    assert not shown.returncode, shown.stderr
    run = next(line for line in shown.stdout.splitlines() if "ponente run" in line)
    for words in (
        "--only gang",
        "--keep-going",
        "--wait 90s",
        "--no-compile",
        "--stay True",
        store[-1],
    ):
        assert words in run
