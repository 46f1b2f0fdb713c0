"""What the two supported lines of JAX do differently; nothing else depends on JAX's version.

constraints.txt has JAX 0.10, for every Python; constraints-newest.txt has JAX 0.12, which needs
Python 3.12. Read from the installed package's metadata: importing this file does not import JAX.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

NEWEST = not importlib.metadata.version("jax").startswith("0.10.")

NO_SCORE_MODIFIER: tuple[Any, ...] = (None,) if NEWEST else ()
"""Last static argument of cuDNN's attention rules for its shapes: the newest takes a function."""

NO_SCORE_MODIFIER_ARRAYS: tuple[Any, ...] = ((),) if NEWEST else ()
"""What such a function reads, after the arrays of those rules."""

WITHOUT_MLIR = {} if NEWEST else {"xla_cpu_use_fusion_emitters": False}
"""Code generation of the CPU backend by MLIR takes most of a compilation, 2.5 times less without.

The newest has no other code generation, and ends the process at this option.
"""
