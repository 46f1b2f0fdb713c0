"""The `ponente` command: the engine's verbs, and the verbs of this step library.

A verb of the library is imported when it is called. `dial` needs nothing, the others outputs of the
library's steps.
"""

from __future__ import annotations

import importlib
from functools import partial

from pipeline import cli


def command() -> None:
    """Entry point of `ponente`."""
    cli.command(
        {
            "dial": (
                "choose a whole recipe by one number: size, tokens, dollars, loss; needs no file",
                partial(_until_interrupted, "steps.cli.dial"),
            ),
            "generate": (
                "continue text with a trained model; needs no file",
                partial(_until_interrupted, "steps.cli.generate"),
            ),
            "dashboard": (
                "serve a store's pages to a browser, as they change; needs no file",
                partial(_until_interrupted, "steps.cli.dashboard"),
            ),
            "compare": ("compare training runs on one page; needs no file", _compare),
            "rewind": (
                "the documents behind a step of a training, with the loss of each row",
                partial(_until_interrupted, "steps.cli.rewind"),
            ),
            "trace": (
                "every step of a training that reads a document",
                partial(_until_interrupted, "steps.cli.trace_document"),
            ),
            "export": (
                "write a model in another project's format; needs no file",
                partial(_until_interrupted, "steps.cli.export"),
            ),
        }
    )


def _until_interrupted(module: str, arguments: list[str]) -> int:
    try:
        return importlib.import_module(module).run(arguments)
    except KeyboardInterrupt:
        # The engine's message is about steps to resume, which these verbs do not have.
        return 130


def _compare(arguments: list[str]) -> int:
    from steps.pages.compare import main

    return main(arguments)
