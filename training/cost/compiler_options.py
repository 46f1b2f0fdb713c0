"""The options with which a train step is compiled: one table, by kind of chip and their number.

None has run on a TPU of ours: what an option does was read off the programs that libtpu makes.
`TrainConfig.compiler_options` adds options, and turns each of these off.
"""

from __future__ import annotations

from collections.abc import Iterable

DEFAULT = "default"
"""The value that leaves an option as the compiler has it."""

_TPU = {
    # 96 MiB (v6e has 128) instead of 32 for one operation, as MaxText and Marin use on v6e; matmuls
    # then read their operands fewer times, and large attention tiles compile.
    "xla_tpu_scoped_vmem_limit_kib": "98304",
    # A threshold that no matmul reaches, so XLA never turns a matmul with a gathered operand into a
    # ring of small matmuls. With embed 1024 on 16 chips these contract over 64 elements at a time
    # and use a quarter of the matrix unit.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # This pass moves the all-reduce of gradients behind the last microbatch. It moves none of this
    # step's all-reduces, and in libtpu 0.0.42.1 it fails where embedding and head are not tied and
    # the state is split ("zero1").
    "xla_disable_hlo_passes": "while-loop-all-reduce-code-motion",
}
# Collectives run on the SparseCores, beside the matmuls, instead of making them wait: without, no
# collective of an FSDP step overlaps with anything. Fusing them with matmuls instead
# (`xla_tpu_enable_async_collective_fusion`) hides fewer, and libtpu 0.0.50.1 refuses it but on v5e.
_SPARSE_CORE = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true"
    for kind in ("all_gather", "2d_all_gather", "3d_all_gather", "all_reduce", "reduce_scatter")
}
# v4's and v5e's programs are the same with them.
_HAVE_SPARSE_CORES = frozenset({"v6e", "v5p", "v7x"})
_GPUS = {
    # Each process chooses its kernels. With shared choices, one that cannot read a kept program and
    # compiles would wait for those of processes that read it.
    "xla_gpu_shard_autotuning": "false",
}


def compiler_options(
    platform: str, chip: str, devices: int, changed: Iterable[tuple[str, str]] = ()
) -> dict[str, str | bool]:
    """Options of XLA by name, for `jax.jit`; `chip` is a name of `pipeline.accelerators`, or ""."""
    found = dict(_TPU) if platform == "tpu" else {}
    if devices > 1 and chip in _HAVE_SPARSE_CORES:
        found |= _SPARSE_CORE
    if devices > 1 and platform == "gpu":
        found |= _GPUS
    found |= dict(changed)
    as_bool = {"true": True, "false": False}  # as words, only TPUs' compiler takes them
    return {name: as_bool.get(v, v) for name, v in found.items() if v != DEFAULT}
