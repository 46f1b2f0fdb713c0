"""One Ray for all of these tests; compilation is cheap, here and in its workers alike.

Results of both are compared bit for bit.
"""

from __future__ import annotations

import pytest

from tests.faults.trainers import quick_compilation
from tests.training.conftest import cheap_compilation as cheap_compilation


@pytest.fixture(scope="package")
def ray_backend(cheap_compilation, tmp_path_factory):
    """Ray hands its workers the environment in which it was started."""
    from pipeline.execute.ray.backend import RayBackend

    with pytest.MonkeyPatch.context() as patch:
        for name, value in quick_compilation(tmp_path_factory.mktemp("workers")).items():
            patch.setenv(name, value)
        # A process that is stopped for a while on purpose is not lost.
        patch.setenv("PONENTE_HEARTBEAT_TIMEOUT", "120")
        backend = RayBackend()
        yield backend
        backend.close()
