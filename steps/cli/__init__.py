"""The `ponente` command: the engine's verbs, and the verbs of this step library.

A verb of the library works on what its steps made and needs no experiment file. Verbs are found
here by name, and what one needs is imported when it is called.
"""

from __future__ import annotations

import importlib

from pipeline import cli


def command() -> None:
    """Entry point of `ponente`."""
    cli.command(
        {
            "generate": ("write with a trained model", _generate),
            "compare": ("training runs side by side on a page", _compare),
            "export": ("a model in another project's format", _export),
        }
    )


def _generate(arguments: list[str]) -> int:
    return _until_interrupted("steps.cli.generate", arguments)


def _export(arguments: list[str]) -> int:
    return _until_interrupted("steps.cli.export", arguments)


def _until_interrupted(module: str, arguments: list[str]) -> int:
    try:
        return importlib.import_module(module).run(arguments)
    except KeyboardInterrupt:
        # The engine's message speaks of steps to resume; here there are none.
        return 130


def _compare(arguments: list[str]) -> int:
    from steps.compare import main

    return main(arguments)
