"""Uploading an export: a step of its own, which runs although the folder was exported before."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
from huggingface_hub import constants

import steps
from pipeline.errors import InputError, StepFailed
from pipeline.graph.step import as_node
from pipeline.store import storage
from tests.faults.fake_hub import FakeHub, Faults
from tests.pipeline.helpers import bring_up, executed
from tests.steps.synthetic import synthetic
from tests.training import tiny

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def upload_hub():
    """A hub to which uploads go; reading from it is another setting."""
    with FakeHub({}) as hub, mock.patch.object(constants, "ENDPOINT", hub.root):
        yield hub


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(a store with a finished export, the model that was exported)."""
    store = str(tmp_path_factory.mktemp("exported"))
    sequences = steps.block_shuffle(synthetic(), sequence_length=tiny.LENGTH)
    model = steps.train(sequences, tiny.MODEL, tiny.OPTIMIZER, tiny.TRAIN)
    bring_up(store, steps.export_hf(model))
    return store, model


def test_a_finished_export_is_uploaded_once_for_each_repository(exported):
    """Asked for afterwards, the folder goes to the hub as it is; the same command does it once."""
    store, model = exported
    with upload_hub() as hub:
        wanted = steps.export_hf(model, upload="me/model")
        assert executed(store, wanted) == ["upload_hf"]
        folder = f"{store}/{as_node(steps.export_hf(model)).directory}"
        names = {name for name, _ in storage.list_files(folder) if name.endswith(".safetensors")}
        sent = hub.uploads["me/model"]
        assert {"config.json", "README.md"} < sent.keys()
        (weights,) = names
        assert sent[weights.rpartition("/")[2]] == storage.read_bytes(f"{folder}/{weights}")
        assert executed(store, wanted) == []
        assert executed(store, steps.export_hf(model, upload="me/other")) == ["upload_hf"]
        assert executed(store, steps.export_hf(model)) == []
    assert hub.uploads.keys() == {"me/model", "me/other"}


def test_a_failed_upload_leaves_the_export_and_the_next_run_uploads(exported):
    """A hub that refuses: the export stays, and nothing but the upload is done again."""
    store, model = exported
    wanted = steps.export_hf(model, upload="me/refused")
    with upload_hub() as hub:
        hub.faults = Faults(1.0, ("401",))
        with pytest.raises(StepFailed, match=r"the hub refused the upload.*HF_TOKEN"):
            bring_up(store, wanted)
        assert not hub.uploads
        hub.faults = Faults()
        assert executed(store, wanted) == ["upload_hf"]
    assert "config.json" in hub.uploads["me/refused"]


@pytest.mark.parametrize("repository", ["model", "a/b/c", "https://huggingface.co/a/b", ""])
def test_what_is_no_repository_is_refused_when_it_is_declared(exported, repository):
    """Before anything trains."""
    with pytest.raises(InputError, match="expected a hub repository owner/name"):
        steps.export_hf(exported[1], upload=repository)
