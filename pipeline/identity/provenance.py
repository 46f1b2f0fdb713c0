"""The provenance of an output: recorded in its manifest, never part of its key.

Once per run, the driver collects the part that all steps share: commits, the uncommitted changes
(as a patch for `git apply`), packages. A worker's copy of the code has no git directory, so the
worker adds only its machine, and the digests of its copy of the step's code.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.identity import source_code

_GIT_SECONDS = 30
_PROJECT = "ponente"
_MOST_BYTES = 2**20  # size limit of an untracked file in the patch


@dataclass(frozen=True)
class Provenance:
    """The provenance that the steps of a run share.

    Attributes:
        record: JSON record for their manifests.
        diff: patch with the uncommitted code; empty when all code is committed.
    """

    record: dict[str, Any]
    diff: str


def collect(functions: Iterable[Callable[..., Any]]) -> Provenance:
    """Commits and uncommitted changes of the functions' repositories, and package versions."""
    commits, diffs = {}, []
    for root in _repositories(functions):
        name = Path(root).name
        commits[name] = _git(root, "rev-parse", "HEAD").strip()
        if diff := _uncommitted(root):
            diffs.append(f"# {name} at {commits[name]}\n{diff}")
    text = "".join(diffs)
    uncommitted = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() if text else ""
    git = {"commit": ", ".join(commits.values()), "uncommitted": uncommitted}
    return Provenance({"git": git, **_packages()}, text)


def of_worker(function: Callable[..., Any], environment: Iterable[str]) -> dict[str, Any]:
    """The machine that executes a step, its environment variables, and digests of its code."""
    return {
        "sources": source_code.digests(function),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "flags": {name: os.environ[name] for name in environment if name in os.environ},
        "executable": sys.executable,
    }


def _git(directory: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")


def _repositories(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Top directories of the git repositories with the code of the engine and of `functions`."""
    directories = {str(Path(__file__).parent)}
    for function in functions:
        try:
            directories.add(os.path.dirname(os.path.realpath(inspect.getfile(function))))
        except TypeError:
            continue
    tops = {_git(d, "rev-parse", "--show-toplevel").strip() for d in sorted(directories)}
    return sorted(tops - {""})


def _uncommitted(root: str) -> str:
    """Patch of all changes since the last commit, and of untracked Python files.

    Leaves out files that git ignores.
    """
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    added = [_added(root, name) for name in sorted(filter(None, listed.split("\0")))]
    return _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary") + "".join(added)


def _added(root: str, name: str) -> str:
    """A patch that creates the file; empty for a file that is too large or is not text."""
    path = Path(root, name)
    try:
        if path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            return ""
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return head
    lines = text.split("\n")
    ending = "" if lines[-1] == "" else "\n\\ No newline at end of file"
    lines = lines[:-1] if lines[-1] == "" else lines
    body = "\n".join(f"+{line}" for line in lines)
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{ending}\n"


def _packages() -> dict[str, Any]:
    """Versions of the project's requirements, and one digest of all installed packages."""
    import importlib.metadata  # imported here: it is a fifth of the engine's import time

    # Each access of `metadata` reads and parses a file, so it is accessed once per package.
    installed = (found.metadata for found in importlib.metadata.distributions())
    versions = {found["Name"].lower(): found["Version"] for found in installed if found["Name"]}
    try:
        asked = importlib.metadata.requires(_PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        asked = []
    names = sorted({re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in asked})
    every = "\n".join(f"{name}=={version}" for name, version in sorted(versions.items()))
    return {
        "packages": {name: versions[name] for name in names if name in versions},
        "installed": hashlib.sha256(every.encode()).hexdigest(),
    }
