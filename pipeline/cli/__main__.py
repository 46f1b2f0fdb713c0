"""The engine's own verbs: python -m pipeline.cli."""

from pipeline.cli import command

command()
