"""Memory and time of a checkpoint as a Hugging Face folder, and of the way back.

    python -m tests.bench.export [--preset llama_3_2_1b] [--dtype bfloat16] [--folder PATH]

One JSON object a line on stdout, for export and import, each in a process of its own: `seconds`,
`peak_gib` (largest resident set, imports of libraries among it), `gib` (of the safetensors) and
`gib_per_second`. The checkpoint has random values, since what is measured does not depend on them.
It takes six bytes of disk a parameter, and four more for the import.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from models.shape import presets
from models.shape.config import TransformerConfig


def make(path: str, config: TransformerConfig) -> None:
    """Write a checkpoint of random values, a row of its arrays at a time."""
    from training.checkpoint.restore import ModelWriter, describe_model

    writer, rng = ModelWriter(path, config), np.random.default_rng(0)
    for name, entry in describe_model(config).items():
        first, *others = entry["shape"]
        step = 1 if name.startswith("blocks.") else first
        for begin in range(0, first, step):
            values = rng.standard_normal((step, *others), np.float32)
            writer.write(name, values, (begin, begin + step))
    writer.finish()


def export(folder: Path, config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Write the folder; its tokenizer is nothing that grows with the model."""
    from steps.exchange.hf.hf_folder import Export, write_hf_folder

    checkpoint = str(folder / "checkpoint")
    request = Export(
        checkpoint=checkpoint, config=config, positions=2048, tokenizer=None, dtype=dtype
    )
    return write_hf_folder(str(folder / "exported"), request)


def back(folder: Path, config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Read the folder into a checkpoint."""
    from models.hf.architectures import architecture_of
    from steps.exchange.hf.hf_files import FolderModel, Tensors
    from steps.exchange.hf.read_hf import write_checkpoint

    del dtype
    exported = str(folder / "exported")
    architecture = architecture_of(config)
    tensors = list(architecture.tensors(config))
    model = FolderModel(architecture, config, 2048, tensors, Tensors(exported))
    write_checkpoint(model, str(folder / "imported"))
    return {"bytes": sum(f.stat().st_size for f in Path(exported).glob("*.safetensors"))}


ACTIONS: dict[str, Callable[[Path, TransformerConfig, str], dict[str, Any]]] = {
    "export": export,
    "import": back,
}


def measure(action: str, folder: Path, preset: str, dtype: str) -> dict[str, Any]:
    """Run one of `ACTIONS` in this process; what it took."""
    began = time.perf_counter()
    done = ACTIONS[action](folder, getattr(presets, preset), dtype)
    seconds = time.perf_counter() - began
    gib = done["bytes"] / 2**30
    return {
        "action": action,
        "preset": preset,
        "dtype": dtype,
        "seconds": round(seconds, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "gib": round(gib, 3),
        "gib_per_second": round(gib / seconds, 3),
    }


def main() -> None:
    """Print one line for each action."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama_3_2_1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--action", choices=("make", *ACTIONS))
    given = parser.parse_args()
    if given.action == "make":
        make(str(given.folder / "checkpoint"), getattr(presets, given.preset))
    elif given.action:
        line = measure(given.action, given.folder, given.preset, given.dtype)
        sys.stdout.write(json.dumps(line) + "\n")
    else:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            for action in ("make", *ACTIONS):
                settings = ["--preset", given.preset, "--dtype", given.dtype, "--folder", folder]
                command = [sys.executable, "-m", "tests.bench.export", "--action", action]
                subprocess.run([*command, *settings], check=True)


if __name__ == "__main__":
    main()
