"""Stores of objects, by fsspec: the operations of `storage`, and what our clients of buckets share.

Every request of such a client goes through `Client.retried`: a transient error (429, 5xx, reset,
truncated body) is retried and then raised as `StoreUnavailable`; a permanent one (no permission, no
bucket) is an `InputError` at once. Both name the URL.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from glob import has_magic
from typing import IO, Any

from fsspec.asyn import sync_wrapper

from pipeline.errors import StorageError
from pipeline.store import retry

GIVE_UP_SECONDS = 90.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 16.0
NO_DATA_SECONDS = 60  # read timeout of a connection
MARK = "ponente-writer"
_MOMENT = 0.4
_memory_lock = threading.Lock()


class Client:
    """Conditional writes and retries, for a class that also derives from fsspec's client.

    A retried write can be refused because an earlier try, whose answer was lost, succeeded: so a
    random mark in the object's metadata identifies the writer.
    """

    errors: tuple[type[Exception], ...]  # those of requests
    give_up_after: float | None  # seconds for one request with its retries; None for the default
    # Methods of the subclass. A write is one request, on the condition that the object has this
    # version, or None that there is none; it raises `FileExistsError` if that is refused.
    is_retriable: Any  # (error) -> bool
    is_refusal: Any  # (error) -> bool
    _write_object: Any  # async (path, data, mark, version)
    _delete_object: Any  # async (path, version)
    _mark_of: Any  # async (path) -> the mark of the object's writer, or None

    async def retried(
        self,
        url: str,
        place: str,
        method: str,
        send: Callable[[], Awaitable[Any]],
        translate: Callable[[Exception], None],
        log_in: Callable[[], bool] | None = None,
    ) -> Any:
        """The answer to a request; `translate` raises what a known permanent error means.

        `log_in` is called once after a refusal, and returns whether to try again.
        """
        limit = GIVE_UP_SECONDS if self.give_up_after is None else self.give_up_after
        policy = retry.Policy(limit, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        attempts = retry.Retry(url, policy, place, "; run again when the store answers")
        while True:
            try:
                # A limit that was given also ends a request that gets no answer; the last one is
                # given a moment, as its answer says what is wrong.
                given = self.give_up_after is not None
                async with asyncio.timeout(max(attempts.left, _MOMENT) if given else None):
                    found = await send()
                attempts.succeeded()
                return found
            except self.errors as error:
                if log_in is not None and self.is_refusal(error):
                    again, log_in = log_in, None
                    if await asyncio.to_thread(again):
                        continue
                if not self.is_retriable(error):
                    translate(error)
                    raise
                pause = attempts.pause(error, f"{method}: {one_line(error)}")
            await asyncio.sleep(pause)

    async def _write_if(self, path: str, data: bytes, version: str | None = None) -> bool:
        mark = uuid.uuid4().hex
        try:
            await self._write_object(path, data, mark, version)
            return True
        except (FileExistsError, FileNotFoundError):
            pass
        try:
            return await self._mark_of(path) == mark
        except FileNotFoundError:
            return False  # deleted since

    async def _replace_if(self, path: str, data: bytes | None, version: str) -> bool:
        if data is not None:
            return await self._write_if(path, data, version)
        try:
            await self._delete_object(path, version)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    create = sync_wrapper(_write_if)
    replace_if = sync_wrapper(_replace_if)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Objects:
    """The operations of `storage` by an fsspec filesystem, which writes unconditionally."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path

    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.path)

    def size(self) -> int | None:
        try:
            return self.fs.info(self.path)["size"]
        except FileNotFoundError:
            return None

    def modified(self) -> float | None:
        try:
            return _seconds(self.fs.modified(self.path))
        except (FileNotFoundError, NotImplementedError, KeyError):  # a store without times
            return None

    def read(self) -> bytes:
        return self.fs.cat_file(self.path)

    def open_read(self) -> IO[bytes]:
        return self.fs.open(self.path, "rb")

    def open_write(self) -> IO[bytes]:
        self.fs.makedirs(os.path.dirname(self.path), exist_ok=True)
        return self.fs.open(self.path, "wb")

    def create(self, data: bytes, durable: bool) -> bool:
        raise StorageError(
            f"{self.path}: this store has no conditional write, which publishing an output needs; "
            "use a local path, gs:// or s3://"
        )

    def read_versioned(self) -> tuple[bytes, str]:
        data = self.read()
        return data, hashlib.sha256(data).hexdigest()

    def replace_if(self, data: bytes | None, version: str) -> bool:
        return self.create(data or b"", durable=True)

    def replace(self, data: bytes, durable: bool) -> None:
        self.fs.pipe_file(self.path, data)

    def list_names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return [*{name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {""}]

    def entries(self) -> dict[str, float]:
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        named = {info["name"].rstrip("/").rsplit("/", 1)[-1]: _written(info) for info in found}
        return {name: written or 0.0 for name, written in named.items() if name}

    def files(self) -> dict[str, int]:
        return {name: info["size"] for name, info in self._find().items()}

    def inventory(self) -> dict[str, tuple[int, float | None]]:
        return {name: (info["size"], _written(info)) for name, info in self._find().items()}

    def _find(self) -> Mapping[str, Any]:
        self.fs.invalidate_cache()
        try:
            return self.fs.find(self.path, detail=True)
        except FileNotFoundError:
            return {}

    def remove(self) -> None:
        try:
            if has_magic(self.path):  # `rm` would expand it as a pattern
                for name in list(self.fs.find(self.path)):
                    self.fs.rm_file(name)
            else:
                self.fs.rm(self.path, recursive=True)
        except FileNotFoundError:
            return


class Bucket(Objects):
    """A bucket, whose filesystem has conditional writes."""

    def create(self, data: bytes, durable: bool) -> bool:
        return self.fs.create(self.path, data)

    def read_versioned(self) -> tuple[bytes, str]:
        # The version is read before the content: if the object is replaced in between, the older
        # version matches nothing and `replace_if` fails safely.
        version = str(self.fs.info(self.path)[getattr(self.fs, "version_field", "ETag")])
        return self.read(), version

    def replace_if(self, data: bytes | None, version: str) -> bool:
        return self.fs.replace_if(self.path, data, version)


class Memory(Objects):
    """fsspec's store in this process's memory."""

    def create(self, data: bytes, durable: bool) -> bool:
        with _memory_lock:
            if self.fs.exists(self.path):
                return False
            self.fs.pipe_file(self.path, data)
            return True

    def replace_if(self, data: bytes | None, version: str) -> bool:
        with _memory_lock:
            if not self.fs.exists(self.path) or self.read_versioned()[1] != version:
                return False
            if data is None:
                self.fs.rm_file(self.path)
            else:
                self.fs.pipe_file(self.path, data)
            return True


def _written(info: Mapping[str, Any]) -> float | None:
    times = ("mtime", "created", "LastModified")
    return next((_seconds(info[t]) for t in times if info.get(t)), None)


def _seconds(time: Any) -> float | None:
    return time.timestamp() if isinstance(time, datetime.datetime) else None
