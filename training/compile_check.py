"""The TPU compiler's verdict on a train step, from a separate process and cached on disk.

    verdict = check(model, optimizer, train, "v6e-16", show=print)

The process compiles for a topology description (`training.cost.topology`), so it needs libtpu but
no TPU. Its verdict is cached in `cache_directory()` under a digest of the configuration, the code
that makes the program, and the versions and flags of the compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.shape.config import TransformerConfig
from pipeline.errors import InputError
from pipeline.store import storage
from training.config import OptimizerConfig, TrainConfig
from training.cost.topology import compiler_versions, describe

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

    `show` is called with a line of progress every 10 seconds while the compiler runs.

    Raises:
        InputError: the compiler failed for another reason than too little memory, or took longer
            than 30 minutes.
    """
    parts = {"model": model, "optimizer": optimizer, "train": train}
    fields = {name: dataclasses.asdict(part) for name, part in parts.items()}
    request = json.dumps({**fields, "slice": slice_name}, sort_keys=True)
    name = hashlib.sha256(f"{request}{_compiler_inputs()}".encode()).hexdigest()
    cached = os.path.join(cache_directory(), "compiled", f"{name}.json")
    try:
        return json.loads(storage.read_bytes(cached))
    except (FileNotFoundError, ValueError):
        pass
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
        [sys.executable, "-m", "training.compile_check"],
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
    from training.preflight import preflight
    from training.step.program import build_program

    request = json.loads(sys.stdin.read())
    devices = describe(request["slice"])
    program = build_program(
        TransformerConfig.from_plain(request["model"]),
        OptimizerConfig(**request["optimizer"]),
        TrainConfig.from_plain(request["train"]),
        devices,
        eos_id=0,
    )
    verdict, _ = preflight(program)
    sys.stdout.write(f"{json.dumps(dataclasses.asdict(verdict))}\n")


if __name__ == "__main__":
    _main()
