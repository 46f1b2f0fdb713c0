"""The device mesh, the sharding of arrays over it, and its processes."""
