"""The job to launch (an experiment's command and its hardware), and what a back end makes of it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware
from pipeline.graph.order import topological
from pipeline.graph.step import Node
from pipeline.store import storage

FOLDER = "launch"  # generated files are written here, and commands read them from here
_NAME_LENGTH = 40  # Google's names end at 63 characters, and back ends add to them
_ZONE = re.compile(r"[a-z]+-[a-z]+\d{1,2}-[a-z]")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*[\w]")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One launch.

    Attributes:
        name: name of every resource that is made; lower case, digits and "-".
        command: what the head runs once all hosts have joined: `ponente run FILE ...`.
        prefix: the store, an object store's URL.
        code: digest of the code that is sent.
        zone: Google's zone, such as us-east5-b; empty for the tool's choice.
        image: container image, for Kubernetes alone.
    """

    name: str
    hardware: Hardware
    command: tuple[str, ...]
    prefix: str
    code: str
    spot: bool = False
    zone: str = ""
    image: str = ""

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
            f"{hardware.processes} hosts of {hardware.devices_per_process} chips{shape}. "
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
    """Generated files, and the shell commands that make machines with them.

    Attributes:
        files: text by name, in `FOLDER`.
        commands: lines for bash, in order, run in the directory that contains `FOLDER`. Only the
            last makes what costs money.
        needs: programs that the commands call.
        undo: commands that end all that costs money; they are printed and never run, because the
            machines are deleted without them when the run ends.
        after: other commands for later, printed and never run.
    """

    files: dict[str, str]
    commands: tuple[str, ...]
    needs: tuple[str, ...]
    undo: tuple[str, ...]
    after: tuple[str, ...] = ()


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
