"""gcsfs with the retries, errors and conditional writes of `object_storage`.

`GoogleStorage` derives from gcsfs's plain class: the default class first sends a request about each
bucket to the storage control service, which no emulator implements.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aiohttp
import google.auth
from gcsfs.core import GCSFile, GCSFileSystem, UnclosableBytesIO
from gcsfs.retry import HttpError, is_retriable
from google.auth.exceptions import GoogleAuthError
from requests.exceptions import RequestException

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import retry
from pipeline.store.object_storage import MARK, NO_DATA_SECONDS, Client, one_line

_ANONYMOUS = "anon"  # gcsfs's word
_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"

# gcsfs's own request, without the decorator that retries it.
_send_once = inspect.unwrap(GCSFileSystem._request)


_HEAD = b"--==0==\nContent-Type: application/json; charset=UTF-8\n\n"
_BODY = b"\n--==0==\nContent-Type: application/octet-stream\n\n"
_TAIL = b"\n--==0==--"


class _Buffer(UnclosableBytesIO):
    """A buffer whose views are of a copy of its bytes, so they outlive the buffer.

    gcsfs sends views, and the traceback of a failed request keeps them alive. When the garbage
    collector frees a buffer before its views, CPython 3.12.1 crashes and 3.13 prints an error.
    """

    def getbuffer(self) -> memoryview:
        return memoryview(self.getvalue())


class _Upload(GCSFile):
    """A file open for writing; what is not sent yet is in a `_Buffer`."""

    @property
    def buffer(self) -> io.BytesIO:
        return self._buffer

    @buffer.setter
    def buffer(self, made: io.BytesIO) -> None:
        self._buffer = _Buffer(made.getvalue())


class GoogleStorage(Client, GCSFileSystem):
    """gcsfs's filesystem with bounded retries and errors that name the URL."""

    version_field = "generation"
    errors = (
        HttpError,
        aiohttp.ClientError,
        RequestException,
        GoogleAuthError,
        OSError,
        ValueError,
    )

    def __init__(self, *args: Any, give_up_after: float | None = None, **kwargs: Any) -> None:
        self._finds_login = not (kwargs.get("token") or os.environ.get("STORAGE_EMULATOR_HOST"))
        if self._finds_login:
            kwargs["token"] = _login()
        super().__init__(*args, **kwargs)
        self.give_up_after = give_up_after
        self.requests_timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=NO_DATA_SECONDS)

    async def _request(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        request = self._format_path(path, args)
        url = _location(request, kwargs)
        return await self.retried(
            url,
            str(self._location),
            method,
            lambda: _send_once(self, method, path, *args, **kwargs),
            lambda error: self._translate(error, request, url),
            self._log_in_again if self._finds_login else None,
        )

    def _log_in_again(self) -> bool:
        # The machine's metadata server may have failed for a moment; the user may log in meanwhile.
        _credentials.cache_clear()
        token = _login()
        if token == _ANONYMOUS:
            return False
        self.credentials.connect(token)
        return True

    async def _info(self, path: str, generation: str | None = None, **kwargs: Any) -> Any:
        """gcsfs's method without its additional listing request for an object that exists."""
        if generation is None and self.split_path(path)[1]:
            try:
                found = await self._get_object(path)
                if not found["name"].endswith("/"):  # a marker of a directory
                    return found
            except FileNotFoundError:
                pass  # perhaps a directory
        return await super()._info(path, generation, **kwargs)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> GCSFile:
        if "r" in mode:
            return super()._open(path, mode, *args, **kwargs)
        settings = {"consistency": self.consistency, **kwargs}
        settings["block_size"] = kwargs.get("block_size") or self.default_block_size
        return _Upload(self, path, mode, *args, **settings)

    async def _write_object(self, path: str, data: bytes, mark: str, version: str | None) -> None:
        bucket, key, _ = self.split_path(path)
        about = json.dumps({"name": key, "metadata": {MARK: mark}}).encode()
        # One request for any size: a resumable upload has several, and tests the precondition at
        # the first and the last.
        await self._call(
            "POST",
            f"{self._location}/upload/storage/v1/b/{quote(bucket)}/o",
            uploadType="multipart",
            headers={"Content-Type": 'multipart/related; boundary="==0=="'},
            data=_HEAD + about + _BODY + data + _TAIL,
            ifGenerationMatch=version or "0",
        )

    async def _delete_object(self, path: str, version: str) -> None:
        bucket, key, _ = self.split_path(path)
        await self._call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)

    async def _mark_of(self, path: str) -> str | None:
        return (await self._info(path)).get("metadata", {}).get(MARK)

    def is_refusal(self, error: Exception) -> bool:
        code = error.code if isinstance(error, HttpError) else None
        no_login = isinstance(error, GoogleAuthError) and not getattr(error, "retryable", False)
        return str(error).startswith("Forbidden") or code in (401, 403) or no_login

    def is_retriable(self, error: Exception) -> bool:
        return (
            is_retriable(error)
            or retry.unreachable(error)
            or isinstance(error, TimeoutError | ConnectionError)
        )

    def _translate(self, error: Exception, request: str, url: str) -> None:
        if self.is_refusal(error):
            raise InputError(
                f"{url}: not permitted ({one_line(error)}); log in (gcloud auth "
                "application-default login) or have the bucket grant objects.create, get, list and "
                "delete"
            ) from error
        # A missing object is a normal answer; a missing bucket is the user's mistake.
        if isinstance(error, FileNotFoundError):
            if "upload_id=" in request:
                raise StoreUnavailable(f"{url}: the store lost an upload in flight") from error
            if "/o/" not in request:
                bucket = url.removeprefix("gs://").partition("/")[0]
                raise InputError(
                    f"{url}: there is no bucket {bucket!r}; create it (gcloud storage buckets "
                    "create) or correct the prefix"
                ) from error


def _login() -> Any:
    """The user's or the machine's Google credentials, or `_ANONYMOUS`, which is not remembered.

    gcsfs's own search waits 15 seconds for the metadata server on a machine that has none.
    """
    try:
        return _credentials()
    except GoogleAuthError:
        return _ANONYMOUS


@functools.cache
def _credentials() -> Any:
    return google.auth.default(scopes=[_SCOPE])[0]


def _location(request: str, options: Mapping[str, Any]) -> str:
    """The gs:// URL of a request's object, or of its bucket where it names no object."""
    parts = urlsplit(request)
    found = re.search(r"/b/([^/]+)(?:/o(?:/([^/]+))?)?", parts.path)
    if found is None:
        return request
    name = unquote(found.group(2) or "")
    if not name:
        query = dict(parse_qsl(parts.query))
        name = query.get("name") or options.get("prefix") or _body_name(options)
    return "/".join(part for part in ("gs:/", unquote(found.group(1)), name) if part)


def _body_name(options: Mapping[str, Any]) -> str:
    body = options.get("data")
    if not isinstance(body, bytes):
        return ""
    start = body.find(b"{")
    end = body.find(b"\n", start)
    try:
        return str(json.loads(body[start:end])["name"])
    except (ValueError, KeyError, TypeError):
        return ""
