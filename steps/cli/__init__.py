"""The `ponente` command: the engine's verbs, and the verbs of this step library."""

from __future__ import annotations

from pipeline import cli

_VERBS = {
    "dial": (
        "choose a whole recipe by one number: size, tokens, dollars, loss; needs no file",
        "steps.cli.dial:run",
    ),
    "generate": ("continue text with a trained model; needs no file", "steps.cli.generate:run"),
    "dashboard": (
        "serve a store's pages to a browser, as they change; needs no file",
        "steps.cli.dashboard:run",
    ),
    "compare": ("compare training runs on one page; needs no file", "steps.pages.compare:main"),
    "rewind": (
        "the documents behind a step of a training, with the loss of each row",
        "steps.cli.rewind:run",
    ),
    "trace": ("every step of a training that reads a document", "steps.cli.trace_document:run"),
    "export": ("write a model in another project's format; needs no file", "steps.cli.export:run"),
}


def command() -> None:
    """Entry point of `ponente`."""
    cli.command(_VERBS)
