"""From an experiment's hardware to machines that run it: recipes, and joining a cluster."""
