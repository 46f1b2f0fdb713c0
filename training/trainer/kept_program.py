"""Keeps the compiled step in the store, so that a resumed run does not compile it again.

Only the step's entry of JAX's persistent compilation cache is kept: XLA's own serialized
executable. No pickle is ever loaded from a file. After process 0 has compiled the step, it writes
the entry in a thread. Every process of a later attempt reads the entry, and uses it only when its
checksum is right and it was compiled from the same program, for the same versions, devices, flags
and, on CPUs, instruction set. Any other entry is ignored with a warning, and the step is compiled.

JAX's cache key of one program differs among the processes of a CPU pod, and JAX writes only the
entry of process 0. The digest of the program is therefore compared, and JAX's key only where all
processes have the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
# Flags that do not change the compiled step: dump options, and the number of devices of a CPU
# ("devices" in `conditions` has it).
_NEUTRAL_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class KeptPrograms:
    """Compiles steps, or loads the steps that an earlier attempt compiled.

    Args:
        programs: kept programs of earlier attempts.
        directory: URL where this attempt writes its own; empty to keep and load none.
        on_program: called in a thread of process 0 with each program written to the store; writes
            its record.
    """

    programs: Sequence[KeptProgram]
    directory: str
    on_program: OnProgram
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.directory and config.compilation_cache_dir.value:
            logger.info("compiled steps are kept in JAX's compilation cache, which is configured")
            self.directory = ""

    def compile(
        self, program: Program, lowered: jax.stages.Lowered
    ) -> tuple[jax.stages.Compiled, bool]:
        """The compiled step, and whether it was loaded; may be called in any thread.

        Args:
            program: the program that the step belongs to.
            lowered: its step, lowered for the shapes it takes.
        """
        if not self.directory:
            return lowered.compile(), False
        made_for = conditions(program, lowered.as_text())
        entry = _Entry(lambda key: self._find({**made_for, _KEY: key}))
        with _jax_cache(entry), _cache_hits() as hits:
            compiled = lowered.compile()
        if entry.offered and not hits:
            logger.warning("kept program ignored: XLA cannot load it (see the warning above)")
        if entry.compiled is not None and not self._closed:
            self._keep(entry.compiled, {**made_for, _KEY: entry.key})
        return compiled, bool(hits)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait up to `seconds` for the writes in flight; a later write gets no record."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._closed = True

    def _find(self, made_for: Mapping[str, str]) -> bytes | None:
        """Bytes of the program made for these conditions, or None with a reason.

        It warns only of this step's: one of another, such as another batch phase's, is expected.
        """
        reasons: list[tuple[int, str]] = []
        for kept in self.programs:
            reason = different(kept.made_for, made_for)
            try:
                if reason is None:
                    return read(kept)
            except (OSError, PonenteError, ValueError) as error:
                reason = str(error)
            same_step = kept.made_for.get("program") == made_for["program"]
            reasons.append((logging.WARNING if same_step else logging.INFO, reason))
        if reasons:
            level, reason = max(reasons)
            logger.log(level, "kept program ignored, the step is compiled: %s", reason)
        return None

    def _keep(self, data: bytes, made_for: Mapping[str, str]) -> None:
        digest = made_for["program"]
        kept = KeptProgram(
            path=storage.join(self.directory, digest[:16], FILE),
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            made_for=made_for,
        )

        def work() -> None:
            try:
                storage.write_atomic(kept.path, data)
                if not self._closed:
                    self.on_program(kept)
            except Exception as error:  # noqa: BLE001 - a faster restart must not fail a run
                logger.warning("%s: not kept, a restart compiles again: %s", kept.path, error)

        thread = threading.Thread(target=work, name="keep-program", daemon=True)
        self._threads.append(thread)
        thread.start()


def read(kept: KeptProgram) -> bytes:
    """The bytes of a kept program.

    Raises:
        ValueError: size or checksum differs from the record.
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
    """The first condition that differs between a kept program and this run; None when equal."""
    for name, value in ours.items():
        if name == _KEY and not _same_key_in_all(ours):
            continue
        if theirs.get(name) != value:
            return f"made for {name} {theirs.get(name)!r}, here it is {value!r}"
    return None


def conditions(program: Program, text: str) -> dict[str, str]:
    """Everything that a compiled step depends on, the most readable differences first.

    Args:
        program: the program that the step belongs to.
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
    """Whether this process has the same JAX cache key as process 0, which wrote the entry."""
    return ours["platform"] != "cpu" or jax.process_index() == 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _flags() -> list[str]:
    variables = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    flags = " ".join(variables).split() + [each for each in sys.argv if each.startswith("--xla")]
    return sorted(flag for flag in flags if not flag.startswith(_NEUTRAL_FLAGS))


def _processor() -> str:
    """CPU model and a digest of its features; other code may hold illegal instructions here.

    XLA checks the instruction set of an executable it loads, but it also compiles for the model.
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
    """A compilation cache with one entry, for one compilation in one thread.

    Attributes:
        key: the key that JAX looked up.
        offered: whether the lookup returned a kept program.
        compiled: the executable that JAX stored; None before.
    """

    def __init__(self, find: Callable[[str], bytes | None]) -> None:
        self._find = find
        self._thread = threading.get_ident()
        self.key = ""
        self.offered = False
        self.compiled: bytes | None = None

    def get(self, key: str) -> Any:
        """Bytes of the program that an earlier attempt kept, or None."""
        if threading.get_ident() != self._thread:
            return None
        self.key = key
        found = self._find(key)
        self.offered = found is not None
        return found

    def put(self, key: str, value: bytes) -> None:
        """Keep the executable that was just compiled."""
        if threading.get_ident() == self._thread and key == self.key:
            self.compiled = value


@contextlib.contextmanager
def _jax_cache(entry: _Entry) -> Iterator[None]:
    """Make `entry` JAX's compilation cache, also for short compilations; its errors only warn."""
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
def _cache_hits() -> Iterator[list[str]]:
    """A list that gets one item for each cache hit of this thread."""
    thread, found = threading.get_ident(), []

    def listen(event: str, **_: Any) -> None:
        if event == _HIT and threading.get_ident() == thread:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(listen)
