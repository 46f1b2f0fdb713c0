"""The TPU compiler's verdict on a train step, before a slice is requested.

    verdict = check(model, optimizer, train, "v6e-16", show=print)

libtpu contains the TPU compiler and can describe any slice, so no TPU is needed. The compiler
refuses a program that does not fit within seconds; one that fits takes as long to compile as on the
slice itself. `check` compiles in a separate process, and caches its verdict in `cache_directory()`
under a digest of the configuration, the code that makes the program, and the versions and flags of
the compiler. Imports no JAX before `describe` has set its environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.shape.config import TransformerConfig
from models.shape.validation import from_plain
from pipeline.accelerators import TPUS, Slices, chip_of, find_slices
from pipeline.errors import InputError
from pipeline.store import storage
from training.config import OptimizerConfig, TrainConfig
from training.cost.audit import Flaw, audit

if TYPE_CHECKING:
    import jax

    from training.step.program import Program


GIB = 2**30
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")


@dataclass(frozen=True)
class Preflight:
    """The compiler's verdict on a train step; sizes are those of one device.

    Attributes:
        limit_gib: memory that a program may use; None for a device whose limit is unknown.
        need_gib: arguments and temporaries; outputs reuse the donated arguments. The compiler
            overlaps temporaries with dead arguments, so a program that fits may use less.
        peak_gib: peak memory in use, the program's code included; None when it does not fit.
        arguments_gib: state and batch.
        temporaries_gib: intermediates, without those offloaded to the host.
        host_gib: host memory; None when it does not fit.
        estimate_gib: estimate of `training.cost.memory_estimate` by content.
        flaws: the audit of the program, see `training.cost.audit`; none when it does not fit.
    """

    fits: bool
    limit_gib: float | None
    need_gib: float
    peak_gib: float | None
    arguments_gib: float
    temporaries_gib: float
    host_gib: float | None
    compile_seconds: float
    estimate_gib: dict[str, float]
    versions: dict[str, str | None]
    flaws: tuple[Flaw, ...]


def preflight(program: Program) -> tuple[Preflight, jax.stages.Compiled | None]:
    """The verdict on the train step of `program`, and the compiled step; None if it does not fit.

    Compiler errors other than too little device memory propagate.
    """
    import jax

    lowered, arguments = program.lower(), argument_bytes(program)
    chip = chip_of(program.layout.mesh.devices.flat[0].device_kind)
    limit = chip.usable if chip is not None else None
    compiled: jax.stages.Compiled | None = None
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
        spent = _spent(compiled)
    except jax.errors.JaxRuntimeError as error:
        refusal = parse_refusal(str(error), arguments)
        if refusal is None:
            raise
        temporaries, limit = refusal
        spent = {
            "need": temporaries + arguments,
            "peak": None,
            "arguments": arguments,
            "temporaries": temporaries,
            "host": None,
        }
    seconds = time.perf_counter() - started
    spent["limit"] = limit
    sizes: Any = {f"{name}_gib": n if n is None else n / GIB for name, n in spent.items()}
    text = None if compiled is None else compiled.as_text()
    verdict = Preflight(
        fits=compiled is not None,
        **sizes,
        compile_seconds=seconds,
        estimate_gib={name: size / GIB for name, size in program.estimate.parts.items()},
        versions=compiler_versions(),
        flaws=() if text is None or chip is None else audit(text, chip),
    )
    return verdict, compiled


def argument_bytes(program: Program) -> int:
    """Bytes of state and batch on one device, without the padding of tiles."""
    import jax

    leaves = jax.tree.leaves((program.abstract, program.abstract_batch()))
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves
    )


def parse_refusal(message: str, arguments: float) -> tuple[float, float] | None:
    """Bytes of intermediates and of the limit in an out-of-memory error; None for other errors.

    `arguments` are the bytes of state and batch, which the total in some messages includes.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    found, included = _TEMPORARIES.search(message), 0.0
    if found is None:
        found, included = _USED.search(message), arguments
    if found is None:
        return None
    used, used_unit, limit, limit_unit = found.groups()
    return float(used) * _UNITS[used_unit] - included, float(limit) * _UNITS[limit_unit]


def _spent(compiled: Any) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # Outputs that alias donated arguments need no memory of their own.
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "need": temporaries + arguments + fresh,
        "peak": memory.peak_memory_in_bytes,
        "arguments": arguments,
        "temporaries": temporaries,
        "host": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
    }


def describe(slice_name: str) -> list[jax.Device]:
    """Devices of one or several slices: "v6e-16", "2xv6e-16", or a topology such as "v6e:4x4".

    Sets the environment variables that let libtpu compile without a TPU. Variables that are already
    set stay, except TPU_ACCELERATOR_TYPE.
    """
    found, topology = _topology(slice_name)
    tpu = found.tpu
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"compiling for {slice_name}: expected the package libtpu, which has the TPU compiler, "
            "and found none; pip install 'ponente[tpu]' (Linux, x86-64)"
        )
    sides = [int(side) for side in topology.split("x")]
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{tpu.google_name}-{math.prod(sides) * tpu.cores}"
    for name, value in _WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
    # Imported after the environment is set, because JAX reads JAX_PLATFORMS at import.
    from jax.experimental import topologies

    # libtpu assumes 2x2 chips per host unless it is given other bounds.
    one_host = tpu.hosts(found.chips) == 1
    bounds = {"chips_per_host_bounds": [*sides, 1, 1][:3]} if one_host else {}
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{tpu.name.replace('v7', 'tpu7')}:{topology}",
        chip_config_name=tpu.chip_config,
        num_slices=found.count,
        **bounds,
    )
    return list(described.devices)


def compiler_versions() -> dict[str, str | None]:
    """Versions of jax and libtpu; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(("jax", "libtpu"))
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _topology(slice_name: str) -> tuple[Slices, str]:
    """The slices that a name denotes, and the topology of one slice: "v6e-16" has "4x4"."""
    if match := re.fullmatch(r"(v\d+[a-z]*):([1-9]\d*(?:x[1-9]\d*){1,2})", slice_name):
        tpu, chips = TPUS.get(match[1]), math.prod(int(side) for side in match[2].split("x"))
        if tpu is not None:
            return Slices(tpu, chips), match[2]
    elif (found := find_slices(slice_name)) is not None:
        return found, found.tpu.topologies[found.chips]
    known = ", ".join(TPUS["v6e"].names)
    raise InputError(
        f"slice: expected one of {known}, such a slice of {', '.join(TPUS)}, several such as "
        f"2xv6e-16, or a topology such as v6e:4x4; got {slice_name!r}"
    )


_WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # libtpu locks the machine's TPU for one process, but compiling does not use the TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_ROOT = Path(__file__).parents[1]
_CODE = ("models", "training")  # with `pipeline/accelerators.py`, all code that makes the program
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# JAX's own frames stay in a traceback: where it removes them it ends the message with a notice.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
_SHOW_SECONDS = 10.0
_LONGEST_SECONDS = 1800.0


def cache_directory() -> str:
    """`PONENTE_CACHE`, else `ponente` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("PONENTE_CACHE") or os.path.join(cache, "ponente")


def check(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    slice_name: str,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """The compiler's verdict: the fields of `training.preflight.Preflight`.

    `show` is called with a line of progress every 10 seconds while the compiler runs. Refuses, with
    `InputError`, where it failed for another reason than too little memory, or took 30 minutes.
    """
    parts = {"model": model, "optimizer": optimizer, "train": train}
    fields = {name: dataclasses.asdict(part) for name, part in parts.items()}
    request = json.dumps({**fields, "slice": slice_name}, sort_keys=True)
    name = hashlib.sha256(f"{request}{_compiler_inputs()}".encode()).hexdigest()
    cached = os.path.join(cache_directory(), "compiled", f"{name}.json")
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(storage.read_bytes(cached))
    found = _compile(request, slice_name, show)
    storage.write_atomic(cached, json.dumps(found).encode())
    return found


def _compiler_inputs() -> str:
    """What the verdict depends on besides the request: code, versions and flags."""
    code = hashlib.sha256((_ROOT / "pipeline" / "accelerators.py").read_bytes())
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            code.update(path.read_bytes())
    flags = [os.environ.get(name, "") for name in _FLAGS]
    return json.dumps([code.hexdigest(), compiler_versions(), flags])


def _compile(request: str, slice_name: str, show: Callable[[str], None]) -> dict[str, Any]:
    show(f"compiling for {slice_name} (--no-compile skips it); {_usual_time()}")
    started = time.monotonic()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "training.preflight"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
        text=True,
    )
    stdin: str | None = request
    try:
        while True:
            try:
                out, err = process.communicate(stdin, timeout=_SHOW_SECONDS)
                break
            except subprocess.TimeoutExpired:
                stdin = None  # a repeated `communicate` continues with the input it was given
                seconds = time.monotonic() - started
                if seconds > _LONGEST_SECONDS:
                    raise InputError(
                        f"the compiler has not finished for {slice_name} in {seconds:.0f} s; "
                        "--no-compile skips it"
                    ) from None
                show(f"compiling for {slice_name}, {seconds:.0f} s")
    finally:
        process.kill()
    if process.returncode:
        raise InputError(
            f"compiling for {slice_name} failed: {_reason(err, process.returncode):.500}"
        )
    return json.loads(out.splitlines()[-1])


def _reason(stderr: str, status: int) -> str:
    """The error that ended the process: what follows the frames of the last traceback."""
    _, traced, last = stderr.rpartition("Traceback (most recent call last):")
    lines = [line for line in last.splitlines() if line.strip() and not line.startswith(" ")]
    if status < 0:
        return f"signal {-status} ended its process, as where memory is short"
    return lines[0 if traced else -1] if lines else "no message"


def _usual_time() -> str:
    """How long the compilations took whose verdicts are cached here, as text."""
    seconds = []
    for path in Path(cache_directory(), "compiled").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            seconds.append(json.loads(path.read_bytes())["compile_seconds"])
    if not seconds:
        return "the first one may take 10 minutes, later ones of an equal step no time"
    return f"here {len(seconds)} such took {min(seconds):.0f} to {max(seconds):.0f} s"


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, so that no compilation outlives it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _main() -> None:
    """Read a request from stdin; write the verdict as the last line of stdout."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from training.step.program import build_program

    request = json.loads(sys.stdin.read())
    devices = describe(request["slice"])
    program = build_program(
        TransformerConfig.from_plain(request["model"]),
        from_plain(OptimizerConfig, request["optimizer"]),
        TrainConfig.from_plain(request["train"]),
        devices,
        eos_id=0,
    )
    verdict, _ = preflight(program)
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(verdict))}\n")


if __name__ == "__main__":
    _main()
