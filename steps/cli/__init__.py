"""The `ponente` command: the engine's verbs, and the verbs of this step library.

Verbs of the library are found here by name, and what one needs is imported when it is called. Most
work on what its steps made and need no experiment's file.
"""

from __future__ import annotations

import importlib

from pipeline import cli


def command() -> None:
    """Entry point of `ponente`."""
    cli.command(
        {
            "tune": ("faster or smaller settings of a step that trains", _tune),
            "generate": ("write with a trained model; needs no file", _generate),
            "compare": ("training runs side by side on a page; needs no file", _compare),
            "export": ("a model in another project's format; needs no file", _export),
        }
    )


def _tune(arguments: list[str]) -> int:
    return _until_interrupted("steps.cli.tune", arguments)


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
