"""The coordinator's address and indices are checked before any process waits for another."""

import pytest

from pipeline.errors import InputError, ResourcesUnavailable
from training.sharding.distributed import Coordinator, initialize


@pytest.mark.parametrize(
    ("address", "count", "index", "words"),
    [
        ("host:1", 2, 2, "got 2 of 2"),
        ("host:1", 2, -1, "got -1 of 2"),
        ("host:1", 0, 0, "got 0 of 0"),
        ("host", 2, 0, "host:port"),
    ],
)
def test_coordinator_refuses(address, count, index, words):
    """An index outside the group and an address without a port are refused."""
    with pytest.raises(InputError, match=words):
        Coordinator(address, count, index)


def test_without_a_coordinator_nothing_is_initialised():
    """A single process joins nothing."""
    import jax

    initialize(None)
    assert jax.process_count() == 1


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
    with pytest.raises(kind, match=message.partition(".")[0].replace("(", ".").replace(")", ".")):
        initialize(None)
