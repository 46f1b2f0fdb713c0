"""Document sampling: hashes, budgets, splits, duplicates."""
