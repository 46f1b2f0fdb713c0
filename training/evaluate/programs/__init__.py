"""Programs that a model writes: run in a sandbox and counted."""
