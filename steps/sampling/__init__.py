"""What the sample step's shards do, and what it reports."""
