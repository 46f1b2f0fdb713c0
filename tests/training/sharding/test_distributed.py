"""Joining a gang."""

import pytest

from pipeline.errors import ResourcesUnavailable
from training.sharding.distributed import joined


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("ABORTED: The TPU is already in use by process with pid 4242.", ResourcesUnavailable),
        ("open(/dev/vfio/0): Device or resource busy", ResourcesUnavailable),
        ("Unable to initialize backend 'tpu': no such device", RuntimeError),
    ],
)
def test_chips_that_another_process_holds_are_waited_for(monkeypatch, message, kind):
    """Named with the host, so that the step is placed again; another error stays what it is."""
    import jax

    def fail():
        raise RuntimeError(message)

    monkeypatch.setattr(jax, "local_devices", fail)
    words = message.partition(".")[0].replace("(", ".").replace(")", ".")
    with pytest.raises(kind, match=words), joined(None):
        pass
