"""Compiles the steps of a run's batch phases in a thread; JAX's compilation cache in the store.

The first step is compiled while the state is restored or initialized: a run waits only for the
longer of the two. In a run of one process SIGTERM ends the wait for a compilation, which may take
minutes while a spot machine has 30 seconds. XLA compilation itself cannot be cancelled: a process
that exits normally still waits for it, and killing the process instead loses nothing.

JAX decides what an entry of its cache depends on and writes those of process 0, whose compilation
took a second or more, as XLA's serialized executables: no pickle is loaded. On a pod of CPUs the
keys differ among the processes, so that all but the first compile.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import compilation_cache, config  # the only way to a cache in any store
from jax._src.compilation_cache_interface import CacheInterface
from jax.stages import Compiled

from pipeline.errors import PonenteError
from pipeline.store import storage
from training.config.batch_schedule import BatchPhase
from training.cost.host_cpu import processor
from training.fault import StopSignal
from training.step.program import Program

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_DIGEST_BYTES = hashlib.sha256().digest_size


class StoreCache(CacheInterface):
    """A cache in a directory of the store; `found` has the keys of the entries it returned."""

    def __init__(self, directory: str) -> None:
        self.found: list[str] = []
        self._directory = directory
        try:
            self._names = set(storage.list_names(directory))
        except (OSError, PonenteError) as error:
            logger.warning("%s: not listed, programs are compiled again: %s", directory, error)
            self._names = set()

    def get(self, key: str) -> Any:
        if key not in self._names:  # most programs are small and compiled in each process
            return None
        url = storage.join(self._directory, key)
        with storage.giving_up_after(_SECONDS):
            entry = storage.read_bytes(url)
        digest, value = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if hashlib.sha256(value).digest() != digest:
            logger.warning("%s: damaged, the program is compiled again", url)
            return None
        self.found.append(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        digest = hashlib.sha256(value).digest()
        with storage.giving_up_after(_SECONDS):
            storage.write_atomic(storage.join(self._directory, key), digest + value)


@contextmanager
def cache_in(directory: str) -> Iterator[list[str]]:
    """A context in which JAX keeps programs in `directory`; gives the keys of those it found.

    Changes nothing where the directory is empty, or the user has configured a cache.
    """
    if not directory or config.compilation_cache_dir.value:
        yield []
        return
    if jax.default_backend() == "cpu":
        directory = storage.join(directory, processor())
    cache = StoreCache(directory)
    before, compilation_cache._cache = compilation_cache._cache, cache
    try:
        yield cache.found
    finally:
        compilation_cache._cache = before


_POLL_SECONDS = 0.2
_STEP = "jit_train_step-"  # beginning of the step's key in JAX's compilation cache


class PhaseCompiler:
    """Compiles the steps of batch phases one after the other. Close it after use.

    `found` has the keys of the programs that JAX's compilation cache had, and grows.
    """

    def __init__(
        self, batch_phases: Sequence[tuple[BatchPhase, Program]], found: Sequence[str]
    ) -> None:
        self._programs = dict(batch_phases)
        self._found = found
        self._thread = ThreadPoolExecutor(1, "compile")
        self._done = 0

    @property
    def loaded(self) -> int:
        """Steps that an earlier attempt had compiled."""
        return sum(key.startswith(_STEP) for key in self._found)

    @property
    def count(self) -> int:
        """Steps compiled so far."""
        return self._done - self.loaded

    def start(self, phase: BatchPhase) -> Future[Compiled]:
        return self._thread.submit(self._compile, phase)

    def phase_after(self, step: int) -> BatchPhase | None:
        """The phase of the step after `step`; None after the last."""
        return next((phase for phase in self._programs if phase.end > step), None)

    def result(self, compiling: Future[Compiled], stop: StopSignal) -> Compiled | None:
        """Wait for a compilation; None when SIGTERM came before its end."""
        while not wait([compiling], timeout=_POLL_SECONDS).done:
            if stop.alone:
                return None
        return compiling.result()

    def close(self) -> None:
        """Start no more compilations; does not wait for one in flight."""
        self._thread.shutdown(wait=False)

    def _compile(self, phase: BatchPhase) -> Compiled:
        compiled = self._programs[phase].compile()
        self._done += 1
        return compiled
