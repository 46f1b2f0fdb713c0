"""The compiled step, kept in the store, so that a resumed run does not compile it again.

What is kept is the entry of JAX's persistent compilation cache for the step and nothing else: XLA's
own serialised executable. No pickle of a file is ever read. Process 0 writes it, in a thread, after
it compiled; every process of a later attempt reads it, and takes it only where its checksum is
right and it was made from the same program, for the same versions, devices, flags and, on CPUs,
instruction set. Anything else is ignored with a line in the log, and the step is compiled.

JAX's keys of one program differ among the processes of a CPU pod, and JAX writes none but process
0's. So the program's own digest is compared, and JAX's key as well wherever it is the same in all.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, config  # the only way to an entry without a shared folder
from jax._src.compilation_cache_interface import CacheInterface

from pipeline.errors import PonenteError
from pipeline.store import storage
from training.config.job import KeptProgram
from training.step.program import Program
from training.step.xla_options import compiler_options

OnProgram = Callable[[KeptProgram], None]

FILE = "step.xla"
CLOSE_SECONDS = 15.0
_READ_SECONDS = 60.0
_HIT = "/jax/compilation_cache/cache_hits"
_KEY = "JAX's key"
# Flags that say what to write about a compilation, and how many devices a CPU has.
_NEUTRAL_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")

logger = logging.getLogger(__name__)


class KeptPrograms:
    """Compiles steps, or loads what an earlier attempt compiled.

    Args:
        programs: of earlier attempts, oldest first.
        directory: URL where this attempt keeps its own; empty to keep and load none.
        on_program: called in a thread of process 0 when one is in the store; write its record.
    """

    def __init__(
        self,
        programs: Sequence[KeptProgram],
        directory: str,
        on_program: OnProgram | None = None,
    ) -> None:
        self._programs = programs
        self._directory = directory
        self._on_program = on_program
        self._threads: list[threading.Thread] = []
        self._closed = False
        if directory and config.compilation_cache_dir.value:
            logger.info("compiled steps are kept in JAX's compilation cache, which is configured")
            self._directory = ""

    def compile(self, program: Program, lowered: Any) -> tuple[Any, bool]:
        """The compiled step, and whether it was loaded; any thread.

        Args:
            program: whose step it is.
            lowered: its step, lowered for the shapes it takes.
        """
        if not self._directory:
            return lowered.compile(), False
        made_for = conditions(program, lowered.as_text())
        entry = _Entry(lambda key: self._find({**made_for, _KEY: key}))
        with _cache(entry), _hits() as hits:
            compiled = lowered.compile()
        if entry.offered and not hits:
            logger.warning("kept program ignored: XLA cannot load it (see the warning above)")
        if entry.compiled is not None and not self._closed:
            self._keep(entry.compiled, {**made_for, _KEY: entry.key})
        return compiled, bool(hits)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for what is on its way to the store; what is late is not recorded any more."""
        for thread in self._threads:
            thread.join(seconds)
        self._closed = True

    def _find(self, made_for: Mapping[str, str]) -> bytes | None:
        """The bytes of a program made for these conditions; the reason is logged where none is."""
        reasons = []
        for kept in reversed(self._programs):
            reason = different(kept.made_for, made_for)
            try:
                if reason is None:
                    return read(kept)
            except (OSError, PonenteError, ValueError) as error:
                reason = str(error)
            reasons.append(reason)
        if reasons:
            logger.warning("kept program ignored, the step is compiled: %s", reasons[0])
        return None

    def _keep(self, data: bytes, made_for: Mapping[str, str]) -> None:
        digest = made_for["program"]
        kept = KeptProgram(
            path=storage.join(self._directory, digest[:16], FILE),
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            made_for=made_for,
        )

        def work() -> None:
            try:
                storage.write_atomic(kept.path, data)
                if self._on_program is not None and not self._closed:
                    self._on_program(kept)
            except Exception as error:  # noqa: BLE001 - a restart in seconds is worth no failed run
                logger.warning("%s: not kept, a restart compiles again: %s", kept.path, error)

        thread = threading.Thread(target=work, name="keep-program", daemon=True)
        self._threads.append(thread)
        thread.start()


def read(kept: KeptProgram) -> bytes:
    """The bytes of a kept program.

    Raises:
        ValueError: they are not those that were written.
        OSError, PonenteError: they cannot be read.
    """
    with storage.giving_up_after(_READ_SECONDS):
        data = storage.read_bytes(kept.path)
    if len(data) != kept.size:
        raise ValueError(f"{kept.path}: {len(data):,} bytes, expected {kept.size:,}")
    found = hashlib.sha256(data).hexdigest()
    if found != kept.sha256:
        raise ValueError(f"{kept.path}: SHA-256 {found[:16]}, expected {kept.sha256[:16]}")
    return data


def different(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """The first condition that a program was made for and that is another here; None when equal."""
    for name, value in ours.items():
        if name == _KEY and not _same_key_in_all(ours):
            continue
        if theirs.get(name) != value:
            return f"made for {name} {theirs.get(name)!r}, here it is {value!r}"
    return None


def conditions(program: Program, text: str) -> dict[str, str]:
    """All that a compiled step depends on, what says most to a reader first.

    Args:
        program: whose step it is.
        text: the step in StableHLO.
    """
    devices = list(program.layout.mesh.devices.flat)
    platform = program.layout.platform
    options = compiler_options(platform) or {}
    ids = ",".join(f"{device.id}@{device.process_index}" for device in devices)
    return {
        "platform": platform,
        **{name: _version(name) for name in ("jax", "jaxlib")},
        "libtpu": _version("libtpu") if platform == "tpu" else "",
        "backend": devices[0].client.platform_version,
        "devices": f"{len(devices)} x {devices[0].device_kind}: {ids}",
        "processes": str(jax.process_count()),
        "CPU": _processor() if platform == "cpu" else "",
        "flags": " ".join(_flags()),
        "options": " ".join(f"{name}={value}" for name, value in sorted(options.items())),
        "program": hashlib.sha256(text.encode()).hexdigest(),
    }


def _same_key_in_all(ours: Mapping[str, str]) -> bool:
    """Whether JAX's key is that of process 0, which wrote the entry."""
    return ours["platform"] != "cpu" or jax.process_index() == 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _flags() -> list[str]:
    given = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    flags = " ".join(given).split() + [each for each in sys.argv if each.startswith("--xla")]
    return sorted(flag for flag in flags if not flag.startswith(_NEUTRAL_FLAGS))


def _processor() -> str:
    """Model and a digest of the instruction set; code for another one may be an illegal one here.

    XLA checks the instruction set of what it loads, but compiles for the model as well.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    features = facts.get("flags") or facts.get("Features") or ""
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:12]
    return f"{facts.get('model name', os.uname().machine)} (features {digest})"


class _Entry(CacheInterface):
    """A cache of one program, for one compilation in one thread.

    Attributes:
        key: what JAX asked for.
        offered: whether it was given a kept program.
        compiled: what JAX gave to keep.
    """

    def __init__(self, find: Callable[[str], bytes | None]) -> None:
        self._find = find
        self._thread = threading.get_ident()
        self.key = ""
        self.offered = False
        self.compiled: bytes | None = None

    def get(self, key: str) -> Any:
        """Bytes that an earlier attempt kept, or None."""
        if threading.get_ident() != self._thread:
            return None
        self.key = key
        found = self._find(key)
        self.offered = found is not None
        return found

    def put(self, key: str, value: bytes) -> None:
        """Take what was just compiled."""
        if threading.get_ident() == self._thread and key == self.key:
            self.compiled = value


@contextlib.contextmanager
def _cache(entry: _Entry) -> Iterator[None]:
    """JAX asks `entry` meanwhile, for however short a compilation, and never fails for it."""
    before, compilation_cache._cache = compilation_cache._cache, entry
    try:
        with (
            config.persistent_cache_min_compile_time_secs(0.0),
            config.raise_persistent_cache_errors(False),
        ):
            yield
    finally:
        compilation_cache._cache = before


@contextlib.contextmanager
def _hits() -> Iterator[list[str]]:
    """What this thread loaded from the cache instead of compiling it."""
    thread, found = threading.get_ident(), []

    def listen(event: str, **_: Any) -> None:
        if event == _HIT and threading.get_ident() == thread:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(listen)
