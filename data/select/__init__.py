"""Which documents: hashes, budgets, splits, duplicates."""
