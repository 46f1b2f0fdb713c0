"""Where an output came from: recorded in its manifest, never part of its key.

The driver collects once per run what all its steps share: commits, everything that is not committed
(as a patch that `git apply` takes), packages. A worker's copy of the code has no git directory, so
it only adds what is its own: the machine, and the code of the step as it is there.
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
_MOST_BYTES = 2**20  # of one untracked file


@dataclass(frozen=True)
class Provenance:
    """What the steps of a run share.

    Attributes:
        record: for their manifests.
        diff: what of the code is not committed; empty when nothing is.
    """

    record: dict[str, Any]
    diff: str


def collect(functions: Iterable[Callable[..., Any]]) -> Provenance:
    """Commits and patch of the repositories that these functions are in, and packages."""
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
    """The machine that executes a step, the values of its variables, and digests of its code."""
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
    """Top directories of the git repositories that have the code of the engine and these."""
    directories = {str(Path(__file__).parent)}
    for function in functions:
        try:
            directories.add(os.path.dirname(os.path.realpath(inspect.getfile(function))))
        except TypeError:
            continue
    tops = {_git(d, "rev-parse", "--show-toplevel").strip() for d in sorted(directories)}
    return sorted(tops - {""})


def _uncommitted(root: str) -> str:
    """Everything that differs from the last commit, and Python files that git does not know yet.

    Nothing of files that git ignores.
    """
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    added = [_added(root, name) for name in sorted(filter(None, listed.split("\0")))]
    return _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary") + "".join(added)


def _added(root: str, name: str) -> str:
    """A patch that creates the file; nothing for one that is too large, or no text."""
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
    """Versions of what the project asks for, and one digest of all that is installed."""
    import importlib.metadata  # a fifth of what importing the engine costs

    # `metadata` reads and parses a file each time that it is asked for.
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
