"""Cheap compilation, here and in Ray's workers alike: their results are compared bit for bit."""

from __future__ import annotations

import pytest

from tests.faults.trainers import quick_compilation
from tests.training.conftest import cheap_compilation as cheap_compilation


@pytest.fixture(scope="package", autouse=True)
def workers_compile_cheaply(cheap_compilation, tmp_path_factory):
    """Ray hands its workers the environment in which it was started."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quick_compilation(tmp_path_factory.mktemp("workers")).items():
            patch.setenv(name, value)
        yield
