"""What one train step costs on one chip by the TPU compiler's own estimate, and where.

    python -m tests.bench.step_cost --model tomat_200m --slice v6e-16 --batch 128 --seq 8192 \\
        --remat full [--baseline] [--top 30]

One JSON object a policy. `executed_over_model`: FLOPs of matmuls and attention kernels over
those of the model (forward and backward once, attention causal, the backward pass of attention as
two matmuls for each one forward); `matmul_over_model` leaves attention out of both. `cycles`: the
compiler's estimates added up with loops multiplied out; it has none for kernels and collectives and
sees no overlap, so they rank programs and predict no seconds. `collectives`: by kind, executions,
bytes on one chip, and executions inside the loop over layers.

`--baseline` adds the same model with parameters split over the whole slice and multiplied in
pieces, everything recomputed, and none of our compiler options. `--top N` adds the N most
expensive instructions, one a line.
A program that does not fit has no cycles; its FLOPs come from its trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any
from unittest import mock

from tests.bench.tpu_options import described, make_program, parser


def line(options: argparse.Namespace, name: str, program: Any) -> tuple[dict[str, Any], Any]:
    """The measurement of one program, and its cost."""
    from tests.training.hlo.cost import executed_over_model, model_flops, program_cost
    from training.preflight import preflight

    found, compiled = preflight(program)
    cost, model = program_cost(program, compiled), program.model
    tokens = options.batch * options.seq / program.layout.devices
    return {
        "measure": "step_cost",
        "program": name,
        **described(options, program),
        "fits": found.fits,
        "need_gib": round(found.need_gib, 3),
        "peak_gib": None if found.peak_gib is None else round(found.peak_gib, 3),
        "counted_in": "compiled" if found.fits else "traced",
        "model_tflops": round(model_flops(program) / 1e12, 3),
        "matmul_tflops": round(cost.matmul_flops / 1e12, 3),
        "attention_tflops": round(cost.attention_flops / 1e12, 3),
        "executed_over_model": round(executed_over_model(program, cost), 4),
        "matmul_over_model": round(cost.matmul_flops / (6 * model.matmul_parameters * tokens), 4),
        "recomputed_dots": cost.recomputed_dots,
        "recomputed_tflops": round(cost.recomputed_flops / 1e12, 3),
        "cycles": cost.cycles,
        "cycles_by_kind": cost.cycles_by_kind,
        "kernels": cost.kernels,
        "collectives": [dataclasses.asdict(each) for each in cost.collectives],
        "loops_of_unknown_length": cost.unknown_loops,
        "compile_seconds": round(found.compile_seconds, 1),
        "versions": found.versions,
    }, cost


def baseline(options: argparse.Namespace) -> Any:
    """Parameters split over the whole slice and multiplied in pieces, everything recomputed.

    What a habit gives: nothing is gathered on purpose, and the compiler has its own defaults.
    """
    import training.step.program
    from training.sharding.layout import Layout, make_layout

    class NeverGathered(Layout):
        def gather(self, tree: Any) -> Any:
            return tree

    def habitual(devices: Any, parallel: Any) -> Layout:
        layout = make_layout(devices, parallel)
        return NeverGathered(layout.mesh, layout.parallel)

    with mock.patch.object(training.step.program, "make_layout", habitual):
        program = make_program(options, remat="full", parallel={"sharding": "fsdp"})
        return without_options(program)


def without_options(program: Any) -> Any:
    """The same program, its step jitted without compiler options."""
    import jax

    from training.step.state import shardings_of

    step = jax.jit(
        program.step.__wrapped__,
        donate_argnums=0,
        out_shardings=(shardings_of(program.abstract), program.layout.replicated),
    )
    return dataclasses.replace(program, step=step)


def operations(cost: Any, top: int) -> list[dict[str, Any]]:
    """The most expensive instructions, most expensive first."""
    return [
        {
            "measure": "operation",
            "rank": rank,
            "share": round(each.cycles / cost.cycles, 4),
            "cycles": each.cycles,
            "times": each.times,
            "kind": each.kind,
            "flops_per_cycle": round(each.flops / each.cycles),
            "result": each.result,
            "op_name": each.op_name,
            "name": each.name,
        }
        for rank, each in enumerate(cost.operations[:top], 1)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print one line a program, and its most expensive instructions."""
    flags = parser(__doc__ or "")
    flags.add_argument("--baseline", action="store_true")
    flags.add_argument("--top", type=int, default=0)
    options = flags.parse_args(arguments)
    programs = [("ponente", make_program(options, remat=r)) for r in options.remat or ["auto"]]
    if options.baseline:
        programs.append(("baseline", baseline(options)))
    for name, program in programs:
        found, cost = line(options, name, program)
        print(json.dumps(found), flush=True)
        for each in operations(cost, options.top):
            print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
