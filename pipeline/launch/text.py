"""How generated files are written: YAML whose scripts read as scripts, under a line of origin."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pipeline.launch.job import Job


def origin(job: Job) -> str:
    """A comment: what a file was generated from."""
    hardware = job.hardware
    shape = f", {hardware.topology}" if hardware.topology else ""
    shape += " a slice" if hardware.slices > 1 else ""
    version = importlib.metadata.version("ponente")
    return (
        f"# ponente {version} for {hardware.name}: {hardware.processes} hosts of "
        f"{hardware.devices_per_process} chips{shape}. Launch again instead of editing this file.\n"
    )


def to_yaml(job: Job, tree: dict[str, Any]) -> str:
    """`tree` as YAML, in its own order, texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return origin(job) + yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000)
