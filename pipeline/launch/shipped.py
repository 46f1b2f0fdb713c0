"""The code that a launch sends: what git would, with its commit; nothing that git ignores.

Outside a git checkout: everything but names that begin with a dot, stores and environments.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from pipeline.errors import InputError
from pipeline.identity import provenance
from pipeline.launch.job import FOLDER
from pipeline.store.shards import ATTEMPTS

_MOST_BYTES = 200 * 2**20


def listed(root: str = ".") -> list[str]:
    """Sorted paths in `root` of the files to send; `InputError` if git fails, or for too much."""
    found = sorted(_files(root))
    sizes: Counter[str] = Counter()
    for name in found:
        sizes[name.partition("/")[0]] += os.lstat(os.path.join(root, name)).st_size
    if (total := sizes.total()) > _MOST_BYTES:
        ((top, _),) = sizes.most_common(1)
        raise InputError(
            f"launch: this directory's code has {total / 2**20:,.0f} MiB, expected at most "
            f"{_MOST_BYTES / 2**20:.0f}; {top} has {sizes[top] / 2**20:,.0f} of it: move it, or "
            "add it to .gitignore"
        )
    return found


def digest(names: list[str], root: str = ".") -> str:
    """A short digest of the files' names and content."""
    found = hashlib.sha256()
    for name in names:
        path = Path(root, name)
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        found.update(f"{name} {len(data)}\n".encode(errors="surrogateescape") + data)
    return found.hexdigest()[:12]


def pack(target: str, names: list[str], more: Mapping[str, str], root: str = ".") -> None:
    """Write the files, those of `more` in `FOLDER`, and the commit to a .tar.gz file."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target, "w:gz") as archive:
        for name in names:
            archive.add(os.path.join(root, name), name, recursive=False)
        for name, text in more.items():
            Path(folder, name).write_text(text)
            archive.add(os.path.join(folder, name), f"{FOLDER}/{name}")
        provenance.ship(root, folder)
        archive.add(os.path.join(folder, provenance.SHIPPED), provenance.SHIPPED)


def _files(root: str) -> Iterator[str]:
    path = Path(root).resolve()
    if not any(os.path.lexists(up / ".git") for up in (path, *path.parents)):
        names = _walk(root)
    else:
        data = cache(lambda folder: folder == Path(FOLDER) or _is_data(Path(root, folder)))
        untracked = _git(root, "--others", "--exclude-standard")
        untracked = [n for n in untracked if not any(map(data, list(Path(n).parents)[:-1]))]
        names = [*_git(root, "--cached"), *untracked]
    for name in names:
        path = os.path.join(root, name)
        if os.path.isdir(path) and not os.path.islink(path):  # a repository in this one
            yield from (os.path.join(name, inner) for inner in _files(path))
        elif os.path.lexists(path):  # else deleted, and not yet committed
            yield name


def _git(root: str, *which: str) -> list[str]:
    try:
        listed = provenance.git(root, "ls-files", "-z", *which)
    except provenance.GitError as error:
        raise InputError(
            f"launch: sends what git would, and git does not list {os.path.abspath(root)}: {error}"
        ) from error
    return [name for name in listed.split("\0") if name]


def _walk(root: str) -> Iterator[str]:
    for directory, folders, files in os.walk(root):
        place = Path(directory).relative_to(root)
        links = [name for name in folders if Path(directory, name).is_symlink()]
        yield from (str(place / name) for name in (*files, *links) if name[0] != ".")
        folders[:] = [
            name for name in folders if name[0] != "." and not _is_data(Path(directory, name))
        ]
        if place == Path():
            folders[:] = [name for name in folders if name != FOLDER]


def _is_data(folder: Path) -> bool:
    """Whether it is compiled code, an environment or a store: a folder of outputs with attempts."""
    if folder.name == "__pycache__" or (folder / "pyvenv.cfg").exists():
        return True
    return any((output / ATTEMPTS).is_dir() for output in folder.iterdir())
