"""Settings of the whole suite: the CPU, eight virtual devices, strict ranks, no network."""

from __future__ import annotations

import os

# Read when jax starts, so they are set before any test module can import it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers are nice to everything else, and so to the rest of this suite, for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")
# Tests compile much and train little: compiling is faster where each thread has a heap.
os.environ.setdefault("MALLOC_ARENA_MAX", "0")
os.environ.pop("PONENTE_PREFIX", None)
os.environ.pop("RAY_ADDRESS", None)

from hypothesis import settings

# How long an example takes says more of the machine's other work than of the code.
settings.register_profile("suite", deadline=None, max_examples=50)
settings.load_profile("suite")
