"""One Ray for all of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package")
def ray_backend():
    """Ray hands its workers the environment in which it was started."""
    from pipeline.execute.ray.backend import RayBackend

    with pytest.MonkeyPatch.context() as patch:
        # A process that is stopped for a while on purpose is not lost.
        patch.setenv("PONENTE_HEARTBEAT_TIMEOUT", "120")
        backend = RayBackend()
        yield backend
        backend.close()
