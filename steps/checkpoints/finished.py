"""The finished trainings of a store, for forecasts: a bounded number, each read once."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator

import msgspec

from pipeline import InputError
from pipeline.errors import CorruptOutput
from pipeline.store import storage
from pipeline.store.manifest import Manifest, readable
from pipeline.store.parallel import concurrently
from steps.artifacts import Checkpoint
from steps.checkpoints.find import is_run

TRAIN = ("train-",)
EVERY = (*TRAIN, "extend-", "warm_start-")
NOT_OURS = (InputError, CorruptOutput, msgspec.ValidationError, KeyError, TypeError)
NOT_OURS += (AttributeError, ValueError, ArithmeticError)
"""Errors of an output of a version with other fields, or that was damaged; it does not count."""
_MOST = 200  # outputs of a store that are looked into; a bucket takes a request for each


def trainings(store: str, begins: tuple[str, ...] = EVERY) -> Iterator[Checkpoint]:
    """Finished trainings whose directories' names begin so, of each in turn the same number."""
    names = storage.list_names(store)
    kinds = [[name for name in names if name.startswith(begin)] for begin in begins]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
    names = sorted([name for name in turns if name][:_MOST])
    paths = [storage.join(store, name) for name in names]
    for path, made in zip(paths, concurrently(manifest_of, paths, store), strict=True):
        if made is not None and is_run(made) and "last" in made.result:
            yield Checkpoint(path, made)


# A plan asks for each of its trainings: what is finished is read once in a process.
@functools.lru_cache(1024)
def _finished(path: str) -> Manifest:
    if (made := readable(path)) is None:
        raise LookupError(path)  # which is not kept: the output may be finished by the next call
    return made


def manifest_of(path: str) -> Manifest | None:
    """The manifest of a finished output, as it was when it was first read."""
    with contextlib.suppress(LookupError):
        return _finished(path)
    return None
