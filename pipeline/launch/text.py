"""Format of generated files: YAML with scripts as literal blocks, and a comment of origin."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from pipeline.launch.job import Job


def origin(job: Job) -> str:
    """A comment with the version and the hardware that a file was generated for."""
    hardware = job.hardware
    shape = f", {hardware.topology}" if hardware.topology else ""
    shape += " a slice" if hardware.slices > 1 else ""
    version = importlib.metadata.version("ponente")
    return (
        f"# ponente {version} for {hardware.name}: {hardware.processes} hosts of "
        f"{hardware.devices_per_process} chips{shape}. Launch again instead of editing this file.\n"
    )


def to_yaml(job: Job, tree: dict[str, Any]) -> str:
    """`tree` as YAML in its own order, with multi-line strings as literal blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return origin(job) + yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=1000)
