"""Several processes training together."""
