"""The job to launch (an experiment's command and its hardware), and what a back end makes of it.

Google's names are from cloud.google.com/tpu/docs (runtimes and each generation) and GKE's "Plan
TPUs".
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from dataclasses import dataclass
from typing import Any

from pipeline.accelerators import TPUS
from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware
from pipeline.graph.order import topological
from pipeline.graph.step import Node
from pipeline.store import storage

FOLDER = "launch"  # generated files are written here, and commands read them from here
_NAME_LENGTH = 40  # Google's names end at 63 characters, and back ends add to them
_ZONE = re.compile(r"[a-z]+-[a-z]+\d{1,2}-[a-z]")
PORT = 6380  # SkyPilot runs its own Ray at the default port 6379
_WAIT = "20m"  # machines that exist are billed; hosts of a slice boot within minutes of each other
# The Ubuntu 22.04 of TPU images has Python 3.10, and its package archive 3.11. After a boot,
# Ubuntu's own updates hold apt's lock for minutes.
SETUP = """\
command -v python3.11 || {
  apt="sudo apt-get -q -y -o DPkg::Lock::Timeout=600"
  $apt update && $apt install python3.11 python3.11-venv make
} && make setup PYTHON=python3.11
"""
LOST = 75  # the status of `join` on a host that lost its Ray or the head
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*[\w]")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One launch."""

    name: str  # of every resource that is made; lower case, digits and "-"
    hardware: Hardware
    command: tuple[str, ...]  # what the head runs once all hosts have joined: `ponente run FILE`
    prefix: str  # the store, an object store's URL
    code: str  # digest of the code that is sent
    spot: bool = False
    capacity: str = ""  # "flex-start" or "reserved", of Google's queues
    zone: str = ""  # Google's, such as us-east5-b; empty for the tool's choice
    image: str = ""  # of a container, for Kubernetes alone

    def __post_init__(self) -> None:
        if storage.is_local(self.prefix):
            raise InputError(
                f"launch: every host must reach the store, and {self.prefix} is on this machine; "
                "give --prefix gs://bucket/dir"
            )
        if self.zone and not _ZONE.fullmatch(self.zone):
            raise InputError(f"--zone: expected a zone such as us-east5-b, got {self.zone!r}")
        if self.image and not _IMAGE.fullmatch(self.image):
            raise InputError(
                f"--image: expected an image such as REGISTRY/NAME:TAG, got {self.image!r}"
            )

    @property
    def folder(self) -> str:  # in the store
        return f"{self.prefix}/launch/{self.name}"

    @property
    def bundle(self) -> str:
        """The code's URL. It names the code: a host of this launch never gets that of another."""
        return f"{self.folder}/code-{self.code}.tar.gz"

    @property
    def head(self) -> str:  # the machine outside the slice, of the gcloud back ends
        return f"{self.name}-head"

    @property
    def packed(self) -> str:  # the code's file in `FOLDER`
        return f"{self.name}.code.tar.gz"

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    def need_zone(self) -> str:
        if not self.zone:
            raise InputError("launch: give --zone, such as us-east5-b; capacity differs by zone")
        return self.zone

    def origin(self) -> str:
        """The comment at the top of every generated file."""
        hardware = self.hardware
        shape = f", {hardware.topology}" if hardware.topology else ""
        shape += " a slice" if hardware.slices > 1 else ""
        return (
            f"# ponente {importlib.metadata.version('ponente')} for {hardware.name}: "
            f"{hardware.processes} hosts of {hardware.chips_per_process} chips{shape}. "
            "Launch again instead of editing this file.\n"
        )

    def to_yaml(self, tree: dict[str, Any]) -> str:
        """`tree` as YAML in its own order, with multi-line strings as literal blocks."""
        import yaml

        class Dumper(yaml.SafeDumper):
            def ignore_aliases(self, data: Any) -> bool:
                return True

        def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
            style = "|" if "\n" in value else None
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        Dumper.add_representer(str, text)
        return self.origin() + yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000)


@dataclass(frozen=True)
class Provisioning:
    """Generated files, and the shell commands that make machines with them."""

    files: dict[str, str]  # text by name, in `FOLDER`
    commands: tuple[str, ...]  # for bash, beside `FOLDER`; only the last makes what costs money
    needs: tuple[str, ...]  # programs that the commands call
    # Commands that end all that costs money. They are printed and never run, because the machines
    # are deleted without them when the run ends.
    undo: tuple[str, ...]
    after: tuple[str, ...] = ()  # other commands for later, printed and never run
    queue: str = ""  # prints the queue's description of the request as JSON
    listed: tuple[str, ...] = ()  # print the names of what there is, of these `names` and others
    names: tuple[str, ...] = ()


def job_name(experiment: str, preset: str) -> str:
    """A name that every cloud accepts, from the names of an experiment and its preset."""
    words = experiment if preset == "full" else f"{experiment}-{preset}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "run"


def hardware_of(targets: list[Node]) -> Hardware:
    """The pod or kind of GPU host that steps request; `InputError` for none or several."""
    found = {
        value
        for node in topological(targets)
        for value in (*node.config.values(), *node.runtime.values())
        if isinstance(value, Hardware) and value.kind in ("tpu", "gpu")
    }
    if len(found) == 1:
        return found.pop()
    names = ", ".join(sorted(hardware.name for hardware in found))
    requested = f"they request {names}" if names else "none requests one"
    raise InputError(
        f"launch: expected steps on one TPU slice or kind of GPU host, {requested}; set the "
        "experiment's hardware, such as --hardware v6e-16"
    )


@dataclass(frozen=True)
class Google:
    """Names for one TPU generation."""

    machine: str  # machine type of a VM; `{}` stands for its number of chips
    runtime: str  # software version of the Cloud TPU API; empty where that does not have it
    gke: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    grouped: bool  # whether Compute Engine has it in managed instance groups


GOOGLE = {
    "v4": Google("ct4p-hightpu-{}t", "tpu-ubuntu2204-base", "tpu-v4-podslice", False),
    "v5e": Google("ct5lp-hightpu-{}t", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", False),
    "v5p": Google("ct5p-hightpu-{}t", "v2-alpha-tpuv5", "tpu-v5p-slice", True),
    "v6e": Google("ct6e-standard-{}t", "v2-alpha-tpuv6e", "tpu-v6e-slice", True),
    "v7x": Google("tpu7x-standard-{}t", "", "tpu7x", True),
}


def machine_type(hardware: Hardware) -> str:
    return GOOGLE[hardware.generation].machine.format(hardware.chips_per_process)


def accelerator_type(hardware: Hardware) -> str:
    """Google's name of one slice, such as v5litepod-8 for v5e-8."""
    return f"{TPUS[hardware.generation].google_name}-{hardware.name.partition('-')[2]}"


def runtime(hardware: Hardware, tool: str) -> str:
    """The software version of a slice that `tool` requests from the Cloud TPU API."""
    if not (found := GOOGLE[hardware.generation].runtime):
        kind = hardware.generation
        raise InputError(f"--on {tool}: the Cloud TPU API has no {kind}; use --on gcloud, kuberay")
    return found


def need_tpu(hardware: Hardware, tool: str) -> Google:
    """Google's names of a slice; `InputError` for GPUs."""
    if hardware.kind != "tpu":
        raise InputError(
            f"--on {tool}: expected a TPU slice, got {hardware.name!r}; hosts with GPUs are "
            "launched with --on sky or --on kuberay"
        )
    return GOOGLE[hardware.generation]


def need_one_slice(hardware: Hardware, tool: str) -> None:
    if hardware.slices > 1:
        raise InputError(
            f"--on {tool}: makes one slice, {hardware.name} is {hardware.slices}; use --on queued "
            "or --on kuberay"
        )


def join(job: Job, head: str, *flags: str) -> str:
    """The command with which a host joins the cluster of a head: its name as a shell reads it."""
    words = [f'.venv/bin/ponente join "{head}:{PORT}" --hardware {job.hardware.name}']
    words += [f"--name {job.name} --wait {_WAIT}", f"--shared {job.folder}/secret", *flags]
    return f"{' '.join(words)} -- .venv/bin/{shlex.join(job.command)}"


def joined(command: str, again: str) -> str:
    """Shell that repeats a `join` while it ends with one of the statuses `again`."""
    return f"""\
while :; do
  {command}
  code=$?
  case $code in {again}) sleep 10 ;; *) break ;; esac
done
"""
