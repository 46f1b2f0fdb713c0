"""Every random suite, at the size of a commit."""

from __future__ import annotations

import importlib
import os

import pytest

from tests.faults.registry import carry_out
from tests.random import NAMES

SEED = int(os.environ.get("PONENTE_SEED", "0"))


def _suites():
    for name in NAMES:
        for index, suite in enumerate(importlib.import_module(f"tests.random.{name}").SUITES):
            marks = [pytest.mark.slow] if suite.slow else []
            yield pytest.param(name, suite, id=f"{name}-{index}", marks=marks)


@pytest.mark.parametrize(("name", "suite"), list(_suites()))
def test_random(name, suite, tmp_path):
    """As the oracle, or refused; the seed of a failure replays it."""
    row = carry_out(name, suite, SEED, suite.ci, tmp_path)
    print(row)  # noqa: T201 - shown when it fails
    assert row["passed"], f"{row.get('replay')}\n{row.get('error')}"
