"""The shape of a model as plain data, and what follows from it; imports no JAX."""
