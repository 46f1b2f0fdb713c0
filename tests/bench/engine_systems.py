"""The two systems side by side: how each runs a toy graph, and where it puts what steps wrote."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.bench import engine_graphs

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MARIN = "0.2.227.dev40316220070"


class System(Protocol):
    """An engine under measurement. `extra` of `run` is the engine's own choice of executor."""

    name: str
    executors: tuple[str, ...]

    def interpreter(self) -> str:
        """The Python it runs in."""
        ...

    def command(self, verb: str, graph: str, store: Path, executor: str) -> list[str]:
        """What to start for the verb `run` or `plan`."""
        ...

    def environment(self, store: Path) -> Mapping[str, str]:
        """What the command needs in its environment."""
        ...

    def output(self, graph: str, step: str, store: Path) -> Path:
        """The directory of a finished step's files. Raises `FileNotFoundError` if there is none."""
        ...

    def versions(self) -> dict[str, str]:
        """Of everything whose version could matter."""
        ...


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


@functools.cache
def _directories(graph: str) -> dict[str, str]:
    from pipeline.graph.order import topological
    from tests.bench.engine_steps import experiment

    return {node.label: node.directory for node in topological(experiment.graph(graph))}


class Ponente:
    """This project's engine, by its command line."""

    name = "ponente"
    executors = ("inline", "ray")

    def interpreter(self) -> str:
        """This one."""
        return sys.executable

    def command(self, verb: str, graph: str, store: Path, executor: str) -> list[str]:
        """The experiment file `engine_ours.py`, as a user would run it."""
        flags = ["--preset", graph, "--prefix", str(store), "--executor", executor]
        return [sys.executable, "-m", "tests.bench.engine_ours", verb, *flags]

    def environment(self, store: Path) -> Mapping[str, str]:
        """Everything is in the flags."""
        del store
        # PYTHONPATH, because the processes run elsewhere and must use this checkout.
        return {"PYTHONPATH": str(ROOT)}

    def output(self, graph: str, step: str, store: Path) -> Path:
        """The published shard of the step."""
        # Imported here, where nothing is being timed.
        from pipeline.store import manifest
        from tests.bench.engine_steps import Line

        directory = str(store / _directories(graph)[step])
        published = manifest.load(directory)
        if published is None:
            raise FileNotFoundError(directory)
        return Path(Line(directory, published).file).parent

    @functools.cache  # noqa: B019 - one object for the life of the command
    def versions(self) -> dict[str, str]:
        """Python, this checkout's commit, Ray."""
        changed = "+changes" if _git("status", "--porcelain") else ""
        return {
            "python": platform.python_version(),
            "ponente": (_git("rev-parse", "--short=10", "HEAD") or "no git") + changed,
            "ray": importlib.metadata.version("ray"),
        }


class Marin:
    """Marin's executor of 2026: `ArtifactStep`s brought up by `run`, its `StepRunner` in-process.

    Args:
        python: interpreter of an environment that has marin-core.
    """

    name = "marin"
    executors = ("8 threads", "64 threads")

    def __init__(self, python: str) -> None:
        self._python = python

    def interpreter(self) -> str:
        """The one it was given."""
        return self._python

    def command(self, verb: str, graph: str, store: Path, executor: str) -> list[str]:
        """The script `engine_marin.py`."""
        del store
        script = str(HERE / "engine_marin.py")
        return [self._python, script, verb, graph, executor.removesuffix(" threads")]

    def environment(self, store: Path) -> Mapping[str, str]:
        """The store, and no accelerator to look for."""
        return {"MARIN_PREFIX": str(store), "JAX_PLATFORMS": "cpu"}

    def output(self, graph: str, step: str, store: Path) -> Path:
        """The step's directory, whose name is the step's name and version."""
        del graph
        # The version is spelled once, in the script; there is one directory a step.
        for status in (store / "toy" / step).glob("*/.executor_status"):
            if status.read_text() == "SUCCESS":
                return status.parent
        raise FileNotFoundError(store / "toy" / step)

    @functools.cache  # noqa: B019 - one object for the life of the command
    def versions(self) -> dict[str, str]:
        """Python and marin-core."""
        code = (
            "import json, platform; from importlib.metadata import version as v; "
            "print(json.dumps({'python': platform.python_version(), "
            "'marin-core': v('marin-core'), 'jax': v('jax')}))"
        )
        done = subprocess.run(
            [self._python, "-c", code], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)


def lines(system: System, graph: str, store: Path) -> dict[str, str]:
    """What the last layer of a finished graph holds, by step."""
    return {
        name: (system.output(graph, name, store) / engine_graphs.OUTPUT).read_text()
        for name in engine_graphs.targets(graph)
    }


def setup_marin(directory: Path, python: str) -> str:
    """Make an environment with marin-core; returns its interpreter.

    Args:
        directory: where the environment goes; used as it is when its interpreter is there.
        python: an interpreter of version 3.12 or later.

    Raises:
        subprocess.CalledProcessError: when the interpreter or the registry does not have it.
    """
    interpreter = str(directory / "bin" / "python")
    if Path(interpreter).exists():
        return interpreter
    subprocess.run([python, "-m", "venv", str(directory)], check=True, stdout=sys.stderr)
    wanted = f"marin-core=={MARIN}"
    uv = Path(sys.executable).with_name("uv")
    # pip needs several minutes to resolve the tree of dependencies that uv resolves in seconds.
    command: list[Any] = (
        [uv, "pip", "install", "--prerelease", "allow", "--python", interpreter, wanted]
        if uv.exists()
        else [interpreter, "-m", "pip", "install", "--quiet", "--pre", wanted]
    )
    subprocess.run(command, check=True, stdout=sys.stderr)
    return interpreter
