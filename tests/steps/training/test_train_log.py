"""What the log of a training says while it trains."""

from __future__ import annotations

import pytest

from pipeline.execute.logs import processes
from pipeline.store import storage
from pipeline.store.append import Tail


@pytest.mark.slow
def test_the_log_of_a_training_has_its_loss(trained):
    """At the first step that is reported and at the last, and between them now and then."""
    attempts = storage.join(trained, "attempts")
    (attempt,) = storage.list_names(attempts)
    text = b"".join(Tail(url).more() for url in processes(storage.join(attempts, attempt)))
    lines = [line for line in text.decode().splitlines() if ": loss " in line]
    assert "step 8 of 8: loss " in lines[-1], text.decode()
    assert len(lines) >= 2
