"""The training loop, its initial state, compilation and run context."""
