"""s3fs with conditional writes and this project's retries and errors.

Every request goes through `_call_s3`. There a transient error (429, 5xx, a conflict with a write in
flight, connection reset) is retried with the policy of `retry` for `GIVE_UP_SECONDS` and then
raised as `StoreUnavailable`; a permanent one (no permission, no bucket) is an `InputError` at once.
Both name the s3:// URL.

A store must implement `If-None-Match: *` and `If-Match` on writes and `If-Match` on deletes, as
Amazon's has since 2024 and 2025; `write_check` tests all three.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from pipeline.errors import InputError
from pipeline.store import retry

GIVE_UP_SECONDS = 90.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 16.0
NO_DATA_SECONDS = 60  # read timeout of a connection

_MARK = "ponente-writer"
_PRECONDITION, _NOT_IMPLEMENTED = 412, 501
_TRANSIENT = (408, 409, 429)  # 409: another write of the object is in flight


class S3Storage(S3FileSystem):
    """s3fs's filesystem with conditional writes, bounded retries and errors that name the URL.

    Args:
        give_up_after: seconds for one request and its retries; None for `GIVE_UP_SECONDS`.
    """

    def __init__(self, *args: Any, give_up_after: float | None = None, **kwargs: Any) -> None:
        options = {
            "connect_timeout": 10,
            "read_timeout": NO_DATA_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
        super().__init__(*args, config_kwargs=options, **kwargs)
        self.give_up_after = give_up_after
        self.retries = 1  # `_call_s3` retries, s3fs does not

    async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        own = self.give_up_after
        limit = GIVE_UP_SECONDS if own is None else own
        url = "/".join(part for part in ("s3:/", kwargs.get("Bucket"), kwargs.get("Key")) if part)
        attempts = retry.Retry(
            url,
            retry.Policy(limit, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, strict=own is not None),
            place=str(self.endpoint_url or "s3"),
            remedy="; run again when the store answers",
        )
        while True:
            try:
                found = await attempts.request(super()._call_s3(method, *args, **kwargs))
                attempts.succeeded()
                return found
            except (OSError, BotoCoreError, aiohttp.ClientError) as error:
                if not _is_retriable(error):
                    _translate_error(error, url)
                    raise
                pause = attempts.pause(error, f"{method}: {_one_line(error)}")
            await asyncio.sleep(pause)

    call_s3 = sync_wrapper(_call_s3)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: a bucket has no directories, and a write must not create a bucket."""

    async def _create(self, path: str, data: bytes) -> bool:
        """Write an object if none exists; returns whether this call wrote it."""
        return await self._put_if(path, data, IfNoneMatch="*")

    create = sync_wrapper(_create)

    async def _replace_if(self, path: str, data: bytes | None, etag: str) -> bool:
        """Replace the object, or delete it (None), if its ETag is `etag`."""
        if data is not None:
            return await self._put_if(path, data, IfMatch=etag)
        bucket, key, _ = self.split_path(path)
        try:
            await self._call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=etag)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    replace_if = sync_wrapper(_replace_if)

    async def _put_if(self, path: str, data: bytes, **condition: str) -> bool:
        """Write in one conditional request; returns whether the object is this call's.

        A retried write can be refused because an earlier try, whose answer was lost, succeeded. A
        random mark in the object's metadata identifies the writer.
        """
        bucket, key, _ = self.split_path(path)
        where, mark = {"Bucket": bucket, "Key": key}, uuid.uuid4().hex
        try:
            about = {_MARK: mark}
            await self._call_s3("put_object", **where, Body=data, Metadata=about, **condition)
            return True
        except (FileExistsError, FileNotFoundError):
            pass
        try:
            found = await self._call_s3("head_object", **where)
        except FileNotFoundError:
            return False  # deleted since
        return found.get("Metadata", {}).get(_MARK) == mark


def _status(error: BaseException) -> int | None:
    """HTTP status of the response; None where there was none."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    if not isinstance(cause, ClientError):
        return None
    return cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)


def _is_retriable(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT or (status >= 500 and status != _NOT_IMPLEMENTED)
    lost = HTTPClientError | aiohttp.ClientError | ConnectionError | TimeoutError
    return isinstance(error, lost) or retry.unreachable(error)


def _translate_error(error: Exception, url: str) -> None:
    """Raise `InputError` or `FileExistsError` for known causes; return for any other error."""
    status, reason = _status(error), _one_line(error)
    if status in (401, 403) or isinstance(error, NoCredentialsError):
        raise InputError(
            f"{url}: not permitted ({reason}); log in (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or a profile) or have the bucket grant s3:PutObject, "
            "GetObject, ListBucket and DeleteObject"
        ) from error
    if status == _PRECONDITION:
        raise FileExistsError(f"{url}: it is not the version expected") from error
    if status == _NOT_IMPLEMENTED:
        raise InputError(
            f"{url}: the store lacks what publishing needs ({reason}); use one with conditional "
            "writes"
        ) from error
    if isinstance(error, BotoCoreError):
        raise InputError(f"{url}: {reason}; correct the URL or the settings of AWS") from error
    if _code(error) == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        raise InputError(
            f"{url}: there is no bucket {bucket!r}; create it (aws s3 mb) or correct the prefix"
        ) from error


def _code(error: BaseException) -> str | None:
    """S3's error code, such as "NoSuchBucket"."""
    cause = error.__cause__
    return cause.response.get("Error", {}).get("Code") if isinstance(cause, ClientError) else None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
