"""Planning a run: the state of a graph in a store, changes since earlier outputs, lineage."""
