"""The first hundred losses of the tiny run are those that were written down."""

import json

import numpy as np
import pytest

from tests.golden import losses


@pytest.mark.slow
def test_the_first_hundred_losses_are_unchanged():
    """Bit for bit on the jaxlib and the kind of processor they come from, within 1e-4 elsewhere."""
    want, got = json.loads(losses.PATH.read_text()), losses.current()
    values = [[float.fromhex(text) for text in run["losses"]] for run in (got, want)]
    np.testing.assert_allclose(*values, rtol=0, atol=1e-4)
    if (got["jaxlib"], got["processor"]) == (want["jaxlib"], want["processor"]):
        assert got["losses"] == want["losses"]
    assert values[0][-1] < values[0][0] - 0.5, "the run learns something"
