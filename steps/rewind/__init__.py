"""The documents behind the steps of a training, and the steps that a document was read in."""
