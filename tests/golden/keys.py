"""The keys that must not change by accident, in `keys.json` beside this file.

A key that changes makes everything that was built under it be built again, on every machine. So a
change of the file is a decision. Raise a step's version, or change a preset, then write it anew

    python -m tests.golden.keys

and say in the commit why. It holds the digests of a table of values, the key of every step of the
200M experiment's presets, and which fields and arguments are `Runtime`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.run_200m import experiment
from pipeline.graph.order import topological
from tests.pipeline.identity import key_values
from tests.pipeline.identity.identity_fields import leaves

PATH = Path(__file__).with_name("keys.json")
# By default the preset reads the text inside the Python that runs: another text, other keys.
DOCUMENTATION = "python-docs://3.11.7"


def current() -> dict[str, Any]:
    """What the file would hold if it were written now."""
    return {
        "values": key_values.digests(),
        "steps": {
            preset: {node.label: node.key for node in topological(experiment.graph(preset, **more))}
            for preset, more in (("full", {}), ("smoke", {"source": DOCUMENTATION}))
        },
        "runtime": sorted(leaf.name for leaf in leaves() if leaf.runtime),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(current(), indent=1) + "\n")
