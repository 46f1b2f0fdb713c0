"""`python -m steps.cli VERB ...` is `ponente VERB ...`."""

from steps.cli import command

command()
