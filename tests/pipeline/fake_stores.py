"""Object stores in memory for the doctor's tests: a good one, and one for each broken promise."""

from __future__ import annotations

import hashlib
import uuid

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.store import storage


class FakeStore(MemoryFileSystem):
    """A bucket in memory, with the conditional create of the project's own stores."""

    protocol = "fakestore"
    store: dict = {}  # noqa: RUF012 - fsspec's memory stores are shared like this
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False

    def __init_subclass__(cls):
        cls.protocol = cls.__name__.lower()

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix(f"{cls.protocol}://").strip("/")

    def create(self, path, data):
        try:
            self.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        if found["type"] == "file":
            found["ETag"] = hashlib.sha256(self.cat_file(path)).hexdigest()
        return found

    def replace_if(self, path, data, version):
        if not self.exists(path) or self.info(path)["ETag"] != version:
            return False
        if data is None:
            self.rm_file(path)
        else:
            self.pipe_file(path, data)
        return True


class Overwrites(FakeStore):
    """Ignores the condition of a create."""

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value, mode="overwrite")


class ReplacesAny(FakeStore):
    """Ignores the condition of a replacement."""

    def replace_if(self, path, data, version):
        self.pipe_file(path, data)
        return True


class DeletesAny(FakeStore):
    """Ignores the condition of a delete, as some that keep S3's protocol do."""

    def replace_if(self, path, data, version):
        if data is not None:
            return super().replace_if(path, data, version)
        self.rm_file(path)
        return True


class ListsLate(FakeStore):
    """A listing does not show what was just written."""

    def ls(self, path, detail=True, **kwargs):
        return []


class KeepsOld(FakeStore):
    """An overwrite is accepted and lost."""

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" or not self.exists(path):
            super().pipe_file(path, value, mode=mode)


class NeverDeletes(FakeStore):
    """A delete is accepted and ignored."""

    def rm(self, path, recursive=False, maxdepth=None):
        return


class Denies(FakeStore):
    """Every access is refused, with a secret in the message."""

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise PermissionError("403 for https://me:hunter2hunter2@store/x\nline 2")


KINDS = {kind.protocol: kind for kind in FakeStore.__subclasses__()} | {"fakestore": FakeStore}
for protocol, kind in KINDS.items():
    fsspec.register_implementation(protocol, kind, clobber=True)


def add_to_buckets(monkeypatch) -> None:
    usual = storage._bucket_class

    def bucket_class(url):
        return KINDS.get(url.partition("://")[0]) or usual(url)

    monkeypatch.setattr(storage, "_bucket_class", bucket_class)
    monkeypatch.setattr(storage, "_STORES", (*storage._STORES, *KINDS))
    buckets = (*storage._BUCKETS, *(f"{protocol}://" for protocol in KINDS))
    monkeypatch.setattr(storage, "_BUCKETS", buckets)


def new(protocol: str) -> str:
    return f"{protocol}://bucket/{uuid.uuid4().hex}"
