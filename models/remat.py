"""What the backward pass keeps of a block, chosen by one setting.

    "none"              keep everything (fastest, most memory)
    "full"              keep the block's input only, recompute the block (least memory)
    "dots"              keep the outputs of matrix products with weights
    "save:gate,up"      keep the named intermediates and the block's input, recompute the rest

A tuple of names means the same as the comma list. Every choice computes the same gradients; only
time and memory differ. "save:queries,keys,values,attention_residuals,mlp_input,gate,up" repeats no
matrix product and no attention, just norms, rotation and SiLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pipeline.errors import InputError

Remat = str | tuple[str, ...]

CHECKPOINT_NAMES: dict[str, str] = {
    "attention_input": "normalised input of attention [batch, position, embed]",
    "queries": "after norm and rotation [batch, position, kv_heads, q_per_kv, head_size]",
    "keys": "after norm and rotation [batch, position, kv_heads, head_size]",
    "values": "[batch, position, kv_heads, head_size]",
    "attention_residuals": "attention's output per head (splash: and its log-sum-exp)",
    "attention_output": "projected output of attention [batch, position, embed]",
    "mlp_input": "residual stream between attention and MLP [batch, position, embed]",
    "gate": "gate projection before SiLU [batch, position, mlp]",
    "up": "up projection [batch, position, mlp]",
}


def checkpoint_policy(remat: Remat) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy for a setting; None means: do not checkpoint at all.

    Raises:
        InputError: the setting or one of its names is unknown.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return None
    if remat == "full":
        return policies.nothing_saveable
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    return policies.save_only_these_names(*_names(remat))


def _names(remat: Remat) -> tuple[str, ...]:
    if isinstance(remat, tuple):
        names = remat
    elif remat.startswith("save:"):
        names = tuple(name.strip() for name in remat.removeprefix("save:").split(","))
    else:
        raise InputError(
            f"remat: expected none, full, dots or save:<names>, found {remat!r}; names to save are "
            f"{', '.join(CHECKPOINT_NAMES)}"
        )
    for name in names:
        if name not in CHECKPOINT_NAMES:
            raise InputError(
                f"remat: no intermediate is called {name!r}; names to save are "
                f"{', '.join(CHECKPOINT_NAMES)}"
            )
    return names
