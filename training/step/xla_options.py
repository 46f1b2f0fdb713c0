"""Options for the compiler, by platform."""

from __future__ import annotations

from models.jax_versions import WITHOUT_MLIR

SCOPED_VMEM_KIB = 98_304
NO_WINDOWED_EINSUM_MIB = 1_000_000


def compiler_options(platform: str) -> dict[str, str] | None:
    """What `jax.jit` passes to XLA for the train step; None for nothing.

    For TPUs (v6e has 128 MiB of vector memory):

    - `xla_tpu_scoped_vmem_limit_kib`: 96 MiB instead of 32 for one operation, as MaxText and Marin
      run on v6e; matmuls then read their operands fewer times, and large attention tiles compile.
    - `xla_jf_spmd_threshold_for_windowed_einsum_mib`: never turn a matmul with a gathered operand
      into a ring of small matmuls. At an embed of 1024 on 16 chips those contract over 64 numbers
      at a time and fill a quarter of the matrix unit.
    - `xla_disable_hlo_passes`: the pass that would sum gradients over the chips once, after the
      last microbatch, moves no sum of ours, and fails in libtpu 0.0.42.1 where the tables are not
      tied and the state is split ("zero1").
    """
    if platform != "tpu":
        return None
    return {
        "xla_tpu_scoped_vmem_limit_kib": str(SCOPED_VMEM_KIB),
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": str(NO_WINDOWED_EINSUM_MIB),
        "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion",
    }


def initialization_options(platform: str) -> dict[str, int] | None:
    """What `jax.jit` passes to XLA for the program that makes a new state; None for nothing.

    It runs once, and on a CPU takes longer to optimise than to run: 1.1 s of processor time for
    4.3 s at 4 layers of 128, with the same bits. Fusions without MLIR are half of that; in the
    train step they are not used, where a loss over 32,768 ids would take a fifth longer.
    """
    if platform != "cpu":
        return None
    return {"xla_backend_optimization_level": 1, **WITHOUT_MLIR}
