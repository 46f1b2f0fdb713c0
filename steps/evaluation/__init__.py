"""Steps that score a model, or let it write."""
