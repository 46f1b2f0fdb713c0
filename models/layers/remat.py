"""The `jax.checkpoint` policies of the settings in `models.shape.remat_names`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from models.shape.remat_names import saved_names


def checkpoint_policy(remat: str) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy of a setting; None where `jax.checkpoint` is not used."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return None
    if remat == "full":
        return policies.nothing_saveable
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    saved, offloaded = saved_names(remat)
    if not offloaded:
        return policies.save_only_these_names(*saved)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )
