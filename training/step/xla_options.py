"""XLA compiler options by platform."""

from __future__ import annotations

from models.jax_versions import WITHOUT_MLIR

SCOPED_VMEM_KIB = 98_304
NO_WINDOWED_EINSUM_MIB = 1_000_000


def compiler_options(platform: str) -> dict[str, str] | None:
    """`compiler_options` of `jax.jit` for the train step; None for no options.

    For TPUs (v6e has 128 MiB of vector memory):

    - `xla_tpu_scoped_vmem_limit_kib`: 96 MiB instead of 32 for one operation, as MaxText and Marin
      use on v6e; matmuls then read their operands fewer times, and large attention tiles compile.
    - `xla_jf_spmd_threshold_for_windowed_einsum_mib`: a threshold that no matmul reaches, so XLA
      never turns a matmul with a gathered operand into a ring of small matmuls. With embed 1024 on
      16 chips these contract over 64 elements at a time and use a quarter of the matrix unit.
    - `xla_disable_hlo_passes`: disables the pass that moves the all-reduce of gradients behind the
      last microbatch. It moves none of this step's all-reduces, and in libtpu 0.0.42.1 it fails
      where embedding and head are not tied and the state is split ("zero1").
    """
    if platform != "tpu":
        return None
    return {
        "xla_tpu_scoped_vmem_limit_kib": str(SCOPED_VMEM_KIB),
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": str(NO_WINDOWED_EINSUM_MIB),
        "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion",
    }


def initialization_options(platform: str) -> dict[str, int] | None:
    """`compiler_options` of `jax.jit` for the program that makes a new state; None for no options.

    It runs once, and on a CPU its optimization takes longer than its execution: with these options
    it takes 1.1 s of CPU time instead of 4.3 s at 4 layers of embed 128, and the state has the same
    bits. Fusions without MLIR give half of the saving. The train step does not use them: its loss
    over 32,768 ids would take a fifth longer.
    """
    if platform != "cpu":
        return None
    return {"xla_backend_optimization_level": 1, **WITHOUT_MLIR}
