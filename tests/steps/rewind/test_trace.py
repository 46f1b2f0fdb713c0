"""Looking for a document in a mixture of which a part cannot be read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeline.errors import InputError
from steps.rewind.sights import trace
from training.config import TrainConfig


class _Part:
    """A part of a mixture with one document, or one whose documents cannot be read."""

    def __init__(self, own: str, *, gone: bool = False) -> None:
        self.own, self.gone = own, gone

    def find(self, wanted):
        if self.gone:
            raise InputError(f"{self.own}: gone")
        return iter([(0, 0)] if self.own in wanted.ids else [])

    def origins(self, shard, documents):
        return [self.own for _ in documents]

    def pieces(self, source, shard, document):
        return []


def test_a_document_is_found_though_another_part_of_the_mixture_cannot_be_read():
    """What is gone is said of a document that no other part has."""
    run = SimpleNamespace(path="run", train=TrainConfig(steps=1, batch_size=1))
    rewinder = SimpleNamespace(run=run, parts=[_Part("a", gone=True), _Part("b")])
    assert list(trace(rewinder, "b")) == [("b", [])]
    with pytest.raises(InputError, match="a: gone"):
        list(trace(rewinder, "c"))
