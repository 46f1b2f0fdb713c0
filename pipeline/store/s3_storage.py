"""s3fs with the retries, errors and conditional writes of `object_storage`.

A store must implement `If-None-Match: *` and `If-Match` on writes and `If-Match` on deletes, as
Amazon's has since 2024 and 2025; `write_check` tests all three.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from pipeline.errors import InputError
from pipeline.store import retry
from pipeline.store.object_storage import MARK, NO_DATA_SECONDS, Client, one_line

_PRECONDITION, _NOT_IMPLEMENTED = 412, 501
_TRANSIENT = (408, 409, 429)  # 409: another write of the object is in flight


class S3Storage(Client, S3FileSystem):
    """s3fs's filesystem with conditional writes, bounded retries and errors that name the URL."""

    errors = (OSError, BotoCoreError, aiohttp.ClientError)

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
        url = "/".join(part for part in ("s3:/", kwargs.get("Bucket"), kwargs.get("Key")) if part)
        call = super()._call_s3
        return await self.retried(
            url,
            str(self.endpoint_url or "s3"),
            method,
            lambda: call(method, *args, **kwargs),
            lambda error: _translate(error, url),
        )

    call_s3 = sync_wrapper(_call_s3)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: a bucket has no directories, and a write must not create a bucket."""

    async def _write_object(self, path: str, data: bytes, mark: str, version: str | None) -> None:
        bucket, key, _ = self.split_path(path)
        match = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        about = {"Bucket": bucket, "Key": key, "Metadata": {MARK: mark}}
        await self._call_s3("put_object", **about, Body=data, **match)

    async def _delete_object(self, path: str, version: str) -> None:
        bucket, key, _ = self.split_path(path)
        await self._call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)

    async def _mark_of(self, path: str) -> str | None:
        bucket, key, _ = self.split_path(path)
        found = await self._call_s3("head_object", Bucket=bucket, Key=key)
        return found.get("Metadata", {}).get(MARK)

    def is_refusal(self, error: Exception) -> bool:
        return _status(error) in (401, 403) or isinstance(error, NoCredentialsError)

    def is_retriable(self, error: Exception) -> bool:
        status = _status(error)
        if status is not None:
            return status in _TRANSIENT or (status >= 500 and status != _NOT_IMPLEMENTED)
        lost = HTTPClientError | aiohttp.ClientError | ConnectionError | TimeoutError
        return isinstance(error, lost) or retry.unreachable(error)


def _status(error: BaseException) -> int | None:
    cause = error if isinstance(error, ClientError) else error.__cause__
    if not isinstance(cause, ClientError):
        return None
    return cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)


def _translate(error: Exception, url: str) -> None:
    status, reason = _status(error), one_line(error)
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
    cause = error.__cause__
    if isinstance(cause, ClientError) and cause.response["Error"].get("Code") == "NoSuchBucket":
        bucket = url.removeprefix("s3://").partition("/")[0]
        raise InputError(
            f"{url}: there is no bucket {bucket!r}; create it (aws s3 mb) or correct the prefix"
        ) from error
