"""The device mesh, where arrays lie on it, and its processes."""
