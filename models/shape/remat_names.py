"""The intermediates of a block that the backward pass may keep, by name; imports no JAX.

    "none"              keep every residual of differentiation (most memory, float32 copies)
    "matmuls"           keep the outputs of every matmul and of attention; recompute norms,
                        rotation and activations, which are cheap: no matmul runs twice
    "attention"         keep attention and its inputs, recompute the MLP's matmuls
    "full"              keep only the block's input, recompute the block (least device memory
                        without offload)
    "dots"              JAX's `dots_with_no_batch_dims_saveable`: keep the outputs of matmuls with
                        weights
    "save:gate,up"      keep the named intermediates and the block's input, recompute the rest
    "save:gate;offload:queries,keys"    the same, and offload some of them to host memory
    "offload:block_input"    recompute the block, with its input in host memory

Every setting computes the same gradients; only time and memory differ.
"""

from __future__ import annotations

from pipeline.errors import InputError

BLOCK_INPUT = "block_input"

CHECKPOINT_NAMES: dict[str, str] = {
    BLOCK_INPUT: "residual stream, on the device unless offloaded [embed, batch, position]",
    "attention_input": "normalised input of attention [embed, batch, position]",
    "queries": "before norm and rotation [query_features, batch, position]",
    "keys": "before norm and rotation [kv_features, batch, position]",
    "values": "[kv_features, batch, position]",
    "attention_residuals": "attention's output [query_features, batch, position] and log-sum-exp",
    "attention_output": "projected output of attention [embed, batch, position]",
    "mlp_input": "residual stream between attention and MLP [embed, batch, position]",
    "gate": "gate projection before SiLU [mlp, batch, position]",
    "up": "up projection [mlp, batch, position]",
}

ATTENTION = ("queries", "keys", "values", "attention_residuals", "mlp_input")
MATMULS = (*ATTENTION, "gate", "up")
NAMED_POLICIES = {"full": (), "attention": ATTENTION, "matmuls": MATMULS}


def saved_names(remat: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names saved on the device and those offloaded to the host, for a setting with names."""
    if remat in NAMED_POLICIES:
        return NAMED_POLICIES[remat], ()
    kept: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
    for part in remat.split(";"):
        verb, colon, names = part.strip().partition(":")
        if not colon or verb not in kept or kept[verb]:
            raise InputError(
                f"remat: expected none, dots, {', '.join(NAMED_POLICIES)}, save:<names> or "
                f"save:<names>;offload:<names>, found {remat!r}; names are "
                f"{', '.join(CHECKPOINT_NAMES)}"
            )
        listed = tuple(name.strip() for name in names.split(","))
        kept[verb] = NAMED_POLICIES.get(names.strip()) or listed
        if unknown := [name for name in kept[verb] if name not in CHECKPOINT_NAMES]:
            raise InputError(
                f"remat: no intermediate is called {unknown[0]!r}; names to save are "
                f"{', '.join(CHECKPOINT_NAMES)}"
            )
    return kept["save"], kept["offload"]
