"""Differences between the two supported JAX versions; no other module depends on the version.

constraints-newest.txt pins JAX 0.12, which needs Python 3.12; constraints-oldest.txt pins JAX 0.10.
The version comes from the installed package's metadata: importing this module imports no JAX.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

NEWEST = not importlib.metadata.version("jax").startswith("0.10.")

NO_SCORE_MODIFIER: tuple[Any, ...] = (None,) if NEWEST else ()
"""Extra static argument of JAX 0.12's cuDNN attention rules: a function that modifies scores."""

NO_SCORE_MODIFIER_ARRAYS: tuple[Any, ...] = ((),) if NEWEST else ()
"""The arrays that such a function reads, passed after the other arrays of these rules."""

WITHOUT_MLIR = {} if NEWEST else {"xla_cpu_use_fusion_emitters": False}
"""Disables MLIR code generation in XLA's CPU backend; compilation is then 2.5 times faster.

JAX 0.12 has no other code generator and aborts the process when given this option.
"""
