"""What a run would do and why: the state of a graph in a store, changes, lineage."""
