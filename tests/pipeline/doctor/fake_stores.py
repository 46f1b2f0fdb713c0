"""Object stores in memory for the doctor's tests: a good one, and one for each broken promise."""

from __future__ import annotations

import uuid

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FakeStore(MemoryFileSystem):
    """An object store in memory, with conditional create as fsspec's own `open(..., "xb")`."""

    protocol = "fakestore"
    store: dict = {}  # noqa: RUF012 - fsspec's memory stores are shared like this
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix(f"{cls.protocol}://").strip("/")


class Overwrites(FakeStore):
    """Ignores the condition of a create."""

    protocol = "overwrites"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, mode="overwrite")


class Refuses(FakeStore):
    """Has no conditional create and says so."""

    protocol = "refuses"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create":
            raise NotImplementedError
        super().pipe_file(path, value)


class ListsLate(FakeStore):
    """A listing that does not show what was just written."""

    protocol = "listslate"

    def ls(self, path, detail=True, **kwargs):
        return []


class KeepsOld(FakeStore):
    """An overwrite is accepted and lost."""

    protocol = "keepsold"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" or not self.exists(path):
            super().pipe_file(path, value, mode=mode)


class NeverDeletes(FakeStore):
    """A delete is accepted and ignored."""

    protocol = "neverdeletes"

    def rm(self, path, recursive=False, maxdepth=None):
        return


class Denies(FakeStore):
    """Every access is refused, with a secret in the message."""

    protocol = "denies"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise PermissionError("403 for https://me:hunter2hunter2@store/x\nline 2")


for kind in FakeStore.__subclasses__():
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


fsspec.register_implementation("fakestore", FakeStore, clobber=True)


def new(protocol: str) -> str:
    """A fresh prefix in a fake store."""
    return f"{protocol}://bucket/{uuid.uuid4().hex}"
