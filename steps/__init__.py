"""The step library: configuration in, artifact out; importable without jax or numpy."""

from steps.platforms import use_cpu_alone

use_cpu_alone()  # before anything imports jax
