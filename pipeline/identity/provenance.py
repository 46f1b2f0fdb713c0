"""The provenance of an output: recorded in its manifest, never part of its key.

Once per run, the driver collects what all steps share: commits, the uncommitted changes (as a patch
for `git apply`), packages. Code that is copied to other machines leaves its git directory behind;
`ship` writes what git said into the copy. What cannot be told is `UNKNOWN`, with the reason: an
empty patch means that all code is committed, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.identity import source_code
from pipeline.identity.secret_text import is_secret_name

SHIPPED = "provenance.json"  # at the root of code that was copied without its git directory
UNKNOWN = "unknown"
_GIT_SECONDS = 30
_PROJECT = "ponente"
_MOST_BYTES = 2**20  # size limit of an untracked file in the patch


class RunProvenance(NamedTuple):
    """What the steps of a run share: a JSON record for manifests, a patch of uncommitted code."""

    record: dict[str, Any]
    diff: str


@dataclass(frozen=True)
class Revision:
    """What code is in a directory; a `problem` where git could not tell."""

    commit: str
    uncommitted: str
    problem: str = ""


def ship(root: str, folder: str) -> None:
    """Write the revision of the code in `root` into `folder`, a copy of it without git."""
    (found,) = _revisions([root]).values()
    Path(folder, SHIPPED).write_text(json.dumps(dataclasses.asdict(found)))


def collect(functions: Iterable[Callable[..., Any]]) -> RunProvenance:
    """Commits and uncommitted changes of the functions' code, and package versions."""
    directories = {str(Path(__file__).parent)}
    for function in functions:
        with contextlib.suppress(TypeError, OSError):
            directories.add(os.path.dirname(os.path.realpath(inspect.getfile(function))))
    found = _revisions(directories)
    text = "".join(
        f"# {Path(root).name} at {code.commit}\n{code.uncommitted}"
        for root, code in found.items()
        if code.uncommitted
    )
    uncommitted = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest() if text else ""
    problems = [code.problem for code in found.values() if code.problem]
    git = {
        "commit": ", ".join(dict.fromkeys(code.commit for code in found.values())),
        "uncommitted": UNKNOWN if problems else uncommitted,
        **({"problem": "; ".join(problems)} if problems else {}),
    }
    return RunProvenance({"git": git, **_packages()}, text)


def of_attempt(
    driver: Mapping[str, Any], environment: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Provenance of the output that this process built, and files that it imported otherwise."""
    edited = source_code.imported_otherwise(driver["sources"])
    made_by = {**driver, "sources": {**driver["sources"], **edited}}
    return {**made_by, **of_worker(environment)}, sorted(edited)


def of_worker(environment: Iterable[str]) -> dict[str, Any]:
    """The machine that executes a step, and those `environment` variables that are no secrets."""
    public = (n for n in environment if n in os.environ and not is_secret_name(n))
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "flags": {name: os.environ[name] for name in public},
        "executable": sys.executable,
    }


class GitError(Exception):
    """Git did not answer; the message says why."""


def git(directory: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").split("\n")
        raise GitError(lines[0] or f"git ended with status {error.returncode}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise GitError(f"{type(error).__name__}: {error}") from None
    return done.stdout.decode(errors="surrogateescape")


def _revisions(directories: Iterable[str]) -> dict[str, Revision]:
    found: dict[str, Revision] = {}
    for directory in sorted(directories):
        try:
            root = git(directory, "rev-parse", "--show-toplevel").strip()
            if root not in found:
                found[root] = Revision(git(root, "rev-parse", "HEAD").strip(), _uncommitted(root))
        except GitError as error:
            above = (Path(directory), *Path(directory).parents)
            copy = next((f for f in above if (f / SHIPPED).is_file()), None)
            unknown = Revision(UNKNOWN, "", f"{directory}: {error}")
            found[str(copy or directory)] = _shipped(copy) if copy else unknown
    return found


def _shipped(copy: Path) -> Revision:
    try:
        found = Revision(**json.loads((copy / SHIPPED).read_text()))
        "".join(dataclasses.astuple(found))  # raises for what is not text
        return found
    except (OSError, ValueError, TypeError) as error:
        return Revision(UNKNOWN, "", f"{copy / SHIPPED}: not readable ({error})")


def _uncommitted(root: str) -> str:
    listed = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    added = [_added(root, name) for name in sorted(filter(None, listed.split("\0")))]
    return git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary") + "".join(added)


def _added(root: str, name: str) -> str:
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
