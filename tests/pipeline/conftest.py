"""The `ponente` command, run in this process."""

from __future__ import annotations

import sys

import pytest

from pipeline.cli import command


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the `ponente` command in this process; returns (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds

    def run(*words, more=None):
        monkeypatch.setattr(sys, "argv", ["ponente", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            command(more)
        return stop.value.code, *capsys.readouterr()

    return run
