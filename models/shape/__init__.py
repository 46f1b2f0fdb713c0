"""A model's shape and what follows from it alone: no module here imports JAX."""
