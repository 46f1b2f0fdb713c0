"""The step library: configuration in, artifact out; importable without jax or numpy."""
