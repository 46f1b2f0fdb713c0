"""Memory of one chip for a train step, as the TPU compiler says, for several policies of remat.

    python -m tests.bench.hbm --model tomat_200m --slice v6e-16 --batch 128 --seq 8192 \\
        --remat matmuls --remat attention --remat full

One JSON object a policy. `fits`; `need_gib`: arguments and temporaries; `peak_gib`: most memory at
any moment, null where the program does not fit; `executed_over_model`: FLOPs that a step executes
by `training.cost.executed_flops`, over those of the model.

`levanter` is what Levanter's own train step of that shape needs from the same compiler, where it
was measured. A program that fits takes minutes to compile, another one seconds.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tests.bench.tpu_options import described, make_program, parser

LEVANTER_SOURCE = (
    "marin-levanter 0.2.227.dev40316220070 with jax 0.11.1 and libtpu 0.0.46.3, its train step "
    "compiled for the same slice, FSDP over embed, float32 parameters, bfloat16 compute, AdamW"
)
_REFUSED = {"fits": False, "peak_gib": None}
LEVANTER: dict[tuple[str, str, int, int], dict[str, dict[str, Any]]] = {
    ("tomat_200m", "v6e-16", 128, 4608): {
        "remat_off": {**_REFUSED, "temporaries_gib": 71.88},
        "remat_on": {"fits": True, "temporaries_gib": 4.00, "peak_gib": 3.18},
    },
    ("tomat_200m", "v6e-16", 64, 4608): {"remat_off": {**_REFUSED, "temporaries_gib": 36.07}},
    ("tomat_200m", "v6e-16", 32, 4608): {
        "remat_off": {"fits": True, "temporaries_gib": 19.12, "peak_gib": 18.42}
    },
    ("tomat_200m", "v6e-16", 128, 8192): {
        "remat_off": {**_REFUSED, "temporaries_gib": 127.13},
        "remat_on": {"fits": True, "temporaries_gib": 7.06, "peak_gib": 5.48},
    },
    ("tomat_1b", "v6e-32", 256, 8192): {"remat_off": {**_REFUSED, "temporaries_gib": 278.06}},
}
"""By preset, slice, batch and sequence length, with recomputation off and on."""


def line(options: argparse.Namespace, remat: str) -> dict[str, Any]:
    """The measurement of one policy."""
    program = make_program(options, remat=remat)
    from training.preflight import preflight

    found, _ = preflight(program)
    shape = (options.model, options.slice.replace("v6e:4x4", "v6e-16"), options.batch, options.seq)
    peers = {} if options.set_model else LEVANTER.get(shape, {})
    return {
        "measure": "hbm",
        **described(options, program),
        "fits": found.fits,
        "limit_gib": found.limit_gib,
        "need_gib": round(found.need_gib, 3),
        "peak_gib": None if found.peak_gib is None else round(found.peak_gib, 3),
        "arguments_gib": round(found.arguments_gib, 3),
        "temporaries_gib": round(found.temporaries_gib, 3),
        "host_gib": None if found.host_gib is None else round(found.host_gib, 3),
        "estimate_gib": {name: round(size, 3) for name, size in found.estimate_gib.items()},
        "estimated_need_gib": round(sum(found.estimate_gib.values()), 3),
        "compile_seconds": round(found.compile_seconds, 1),
        "versions": found.versions,
        "levanter": {**peers, "source": LEVANTER_SOURCE} if peers else None,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one line a policy."""
    options = parser(__doc__ or "").parse_args(arguments)
    for remat in options.remat or ["auto"]:
        print(json.dumps(line(options, remat)), flush=True)


if __name__ == "__main__":
    main()
