"""JAX's compilation cache, with its entries in the store: a restart does not compile again.

JAX decides what an entry depends on and writes those of process 0, whose compilation took a second
or more. They are XLA's serialized executables: no pickle is loaded. A damaged entry is compiled
again. On a pod of CPUs the keys differ among the processes, so that all but the first compile.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, config  # the only way to a cache in any store
from jax._src.compilation_cache_interface import CacheInterface

from pipeline.errors import PonenteError
from pipeline.store import storage

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_DIGEST_BYTES = hashlib.sha256().digest_size


class StoreCache(CacheInterface):
    """A cache in a directory of the store.

    Attributes:
        found: keys of the entries that were returned.
    """

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
        directory = storage.join(directory, _processor())
    cache = StoreCache(directory)
    before, compilation_cache._cache = compilation_cache._cache, cache
    try:
        yield cache.found
    finally:
        compilation_cache._cache = before


def _processor() -> str:
    """Digest of this CPU's model and instructions, for which XLA compiles; JAX's keys lack it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = ("model name", "flags", "Features")
    own = sorted({line for line in lines if line.startswith(kinds)}) or lines[:1]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()[:12]
