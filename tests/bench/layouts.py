"""What each way to share a model among chips costs, as the TPU compiler says.

    python -m tests.bench.layouts --slice v6e-16 --batch 64 --seq 8192
    python -m tests.bench.layouts --layout fsdp --layout sequence4 --set-model vocab_size=128256

One JSON object a layout: whether the step fits, its peak beside the estimate, cycles outside
kernels and collectives, executed over the model's FLOPs, and per kind of collective how often it
runs in a step and how many MB it moves on one chip. Without `--set-model` the model has two layers
of the shape of a 1B one.
"""

from __future__ import annotations

import json
from typing import Any

from tests.bench.tpu_options import described, make_program, parser

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"sharding": "replicated"},
    "zero1": {"sharding": "zero1"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-group4": {"sharding": "fsdp", "group": 4},
    "split-tables": {"sharding": "fsdp", "group": 4, "rules": "SPLIT_TABLES"},
    "tensor2": {"sharding": "replicated", "tensor": 2},
    "tensor4": {"sharding": "replicated", "tensor": 4},
    "sequence2": {"sharding": "zero1", "sequence": 2},
    "sequence4": {"sharding": "zero1", "sequence": 4},
    "fsdp-sequence2-tensor2": {"sharding": "fsdp", "sequence": 2, "tensor": 2},
}
"""Fields of `Parallelism`; the rules by the name they have in `training.config`."""
SMALL = {
    **{"layers": 2, "embed": 2048, "heads": 16, "kv_heads": 8, "head_size": 128, "mlp": 5632},
    **{"vocab_size": 32768},
}


def fields(name: str) -> dict[str, Any]:
    """What a layout passes to `Parallelism`."""
    from training import config

    found = dict(LAYOUTS[name])
    if "rules" in found:
        found["rules"] = getattr(config, found["rules"])
    return found


def line(options: Any, name: str) -> dict[str, Any]:
    """The measurement of one layout."""
    from tests.training.hlo import cost
    from training.cost.memory_estimate import GIB
    from training.preflight import preflight

    remat = options.remat[0] if options.remat else "matmuls"
    program = make_program(options, remat=remat, parallel=fields(name))
    found, compiled = preflight(program)
    counted = None if compiled is None else cost(compiled.as_text())
    return {
        "measure": "layout",
        "layout": name,
        **described(options, program),
        "fits": found.fits,
        "gib": round(found.peak_gib or found.need_gib, 3),
        "estimate_gib": round(program.estimate.total / GIB, 3),
        "cycles": None if counted is None else counted.cycles,
        "collectives": {
            each.kind: {"count": each.count, "mb": round(each.bytes / 1e6, 1)}
            for each in (counted.collectives if counted else ())
        },
        "compile_seconds": round(found.compile_seconds, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one line per layout."""
    flags = parser(__doc__ or "")
    flags.add_argument("--layout", action="append", choices=LAYOUTS)
    flags.set_defaults(batch=64)
    options = flags.parse_args(arguments)
    options.set_model = options.set_model or list(SMALL.items())
    for name in options.layout or LAYOUTS:
        print(json.dumps(line(options, name)), flush=True)


if __name__ == "__main__":
    main()
