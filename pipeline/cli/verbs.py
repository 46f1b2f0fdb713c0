"""The verbs of the engine and their flags, as arguments of argparse."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.execute.spending import Budget
from pipeline.graph.capacity import Capacity
from pipeline.graph.declaration import FULL
from pipeline.launch import LOCAL, TARGETS


def names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def seconds(text: str) -> float:
    """Seconds of a time such as 90s, 30m, 6h or 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 30m or 6h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _count(text: str) -> int:
    if re.fullmatch(r"\d{1,9}", text) is None:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return int(text)


def _flag(help: str, **how: Any) -> dict[str, Any]:
    return {"help": help, **how}


def _switch(help: str) -> dict[str, Any]:
    return {"help": help, "action": "store_true"}


def _steps(help: str) -> dict[str, Any]:
    # Labels may hold commas, so only the graph tells which names these are, see `plan.state.pick`.
    return {"help": help, "action": "append", "default": [], "metavar": "STEP,..."}


# Every flag of every verb, by the name of its value.
FLAGS: dict[str, dict[str, Any]] = {
    "preset": _flag(f"which settings; {FULL} for the defaults", metavar="NAME"),
    "prefix": _flag(
        "store: a path, gs://bucket/dir or s3://bucket/dir; else PONENTE_PREFIX, else ./runs",
        metavar="URL",
        default=os.environ.get("PONENTE_PREFIX", "./runs"),
    ),
    "shared": _flag(
        "more stores, only read; else PONENTE_SHARED",
        metavar="URL,...",
        type=names,
        default=names(os.environ.get("PONENTE_SHARED", "")),
    ),
    "only": _steps("run only these"),
    "until": _steps("stop after these"),
    "force": _steps("build these again"),
    "keep_shards": _switch("keep other code's shards of unfinished builds"),
    "keep_going": _switch("after a failure, run what does not depend on it"),
    "strict": _switch("refuse outputs built by other code"),
    "wait": _flag(
        "how long a step may wait for hardware, such as 6h", type=seconds, metavar="TIME"
    ),
    "jobs": _flag(
        "steps in parallel; 0: what the resources allow", metavar="N", type=_count, default=0
    ),
    "executor": _flag(
        "inline is this process; auto: for small graphs",
        choices=("auto", "ray", "inline"),
        default="auto",
    ),
    "cluster": _flag(
        "auto, or its address; else RAY_ADDRESS, else none",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS"),
    ),
    "final": _switch("exit with 0 when stopped: nothing starts it again"),
    "json": _switch("print one JSON object"),
    "html": _flag("write a page", metavar="FILE"),
    "delete": _switch("delete the listed objects"),
    "follow": _switch("keep printing as the logs grow"),
    "watch": _switch("show the newest run until it has ended"),
    "presets_only": _switch("list outputs of recorded runs too"),
    "older_than": _flag("keep younger objects", type=seconds, default=0.0, metavar="14d"),
    "keep": {**_steps("keep these"), "metavar": "STEP|DIR,..."},
    "undo": _switch("remove an adopted output"),
    "link": _switch("refer to outputs of other stores, copy none"),
    "yes": _switch("do not ask"),
    "batches": _flag("with --on: others", type=lambda text: [*map(_count, text.split(","))]),
    "compile": _flag("with --on NAME: plans to compile, minutes each", type=_count, default=0),
    "source": _flag("directory of the output to adopt", metavar="DIR"),
    "no_compile": {
        **_switch("without the compiler; or PONENTE_NO_COMPILE"),
        "default": bool(os.environ.get("PONENTE_NO_COMPILE")),
    },
    "no_learning": _switch("predict without the store's finished runs"),
    "on": _flag(
        "sky, kuberay, gcluster (Cluster Toolkit), gcloud (managed group), queued (queued "
        "resource), or local: this machine imitates the hosts",
        choices=(*TARGETS, LOCAL),
    ),
    "spot": _switch("preemptible machines, cheaper: see `plan`"),
    "preemptions": _flag("hours between them, or a file", type=Capacity.parse, metavar="HOURS"),
    "budget": _flag("most that it may spend: '$40', or 3h", type=Budget.parse, metavar="AMOUNT"),
    "zone": _flag("Google's zone, such as us-east5-b", default="", metavar="ZONE"),
    "zones": _flag("zones to try in order", default=(), type=names, metavar="ZONE,..."),
    "zone_wait": _flag("time in each queue (15m)", default=900.0, type=seconds, metavar="TIME"),
    "capacity": _flag("another queue", default="", choices=("flex-start", "reserved")),
    "image": _flag(
        "container image to build and push, for Kubernetes", default="", metavar="REGISTRY/NAME:TAG"
    ),
    "go": _switch("run what is else printed; --on local needs no --go"),
    "help": _switch("print this help"),
    "help_settings": _switch("every setting, with its value under the preset"),
}
# Flag as typed -> its name in `FLAGS`.
SPELLED = {"--from" if n == "source" else f"--{n.replace('_', '-')}": n for n in FLAGS}
SHORT = {"help": "-h"}
EVERY = ("preset", "prefix", "shared", "help", "help_settings")
_CHOICE = ("only", "until", "force", "keep_shards", "strict")
LAUNCHED = (*_CHOICE, "keep_going", "wait", "no_compile", "spot", "budget")  # `launch` passes on
_RUN = (*LAUNCHED, "preemptions", "jobs", "executor", "cluster", "link")


@dataclass(frozen=True)
class Verb:
    """A verb of the command line."""

    help: str
    flags: tuple[str, ...] = ()
    words: str = ""
    own: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # not as in `FLAGS`


VERBS = {
    "run": Verb("bring every step up to date", (*_RUN, "final")),
    "plan": Verb(
        "what a run would do, and why; of steps every reason; --on: how it does on hardware",
        (*_RUN, "no_learning", "json", "html", "on", "batches", "compile"),
        "[STEP ...]",
        {"on": _flag("time and cost on v6e-8,2xv5e-16,v5p; or all", type=names, default=())},
    ),
    "status": Verb(
        "progress of the steps, and the last runs", (*_CHOICE, "json", "watch"), "[STEP ...]"
    ),
    "stop": Verb("cancel a run on any machine; it saves and ends", (), "[RUN]"),
    "show": Verb("one output: configuration, result, lineage", ("json",), "STEP"),
    "launch": Verb(
        "make machines for the experiment's hardware and run it on them",
        ("on", "capacity", "zone", "zones", "zone_wait", "image", "go", *LAUNCHED),
    ),
    "logs": Verb("the logs of a step's last attempt", ("follow",), "STEP"),
    "verify": Verb("compare outputs with their digests", ("json",), "[STEP ...]"),
    "gc": Verb(
        "list, or delete, what no preset and no recorded run needs",
        ("delete", "presets_only", "older_than", "keep", "yes", "json"),
        "[FILE ...]",
    ),
    "adopt": Verb(
        "use an output from elsewhere for a step", ("source", "link", "undo", "yes"), "STEP"
    ),
    "unlock": Verb("end the lease of an owner that hangs", ("yes",), "STEP"),
    "spending": Verb("hours and dollars of a store's runs; needs no file", ("json",), "[STORE]"),
    "doctor": Verb("check this machine and the store; needs no file", ("json",)),
}
# Verbs that need no experiment.
FREE = ("doctor", "spending")
EXIT_CODES = "exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 stopped, 143 SIGTERM"
