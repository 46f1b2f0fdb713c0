"""Check a store before any work starts: that it keeps the commit protocol, and what it costs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InputError, PonenteError
from pipeline.store import storage

# Seconds for one request and its retries: the first one to a bucket far away makes a connection and
# fetches a token. A wrong name and a host that is not there are refused at once.
_CHECK_SECONDS = 15.0
_NO_CREATE = (
    "files cannot be published here, as its file system has neither hard links nor a rename that "
    "replaces nothing ({}); as a Drive mounted in Colab, or a bucket mounted by gcsfuse"
)
_NO_LOCK = (
    "files cannot be replaced safely here, as its file system has no locks ({}); mount it with "
    "them (Lustre: -o flock, NFS: version 4, or lockd on both sides)"
)
# What a file system answers to what it cannot do; one that is full or fails answers otherwise.
_CANNOT = {
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENOLCK,
}
# An attempt that was paused may drop a shard of its successor, which publishing then finds missing.
_ANY_DELETE = "its deletes are not conditional: let one run at a time build in it"
_ABOUT_SECONDS = 5.0
_CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
_ELSEWHERE = "; give the --prefix of a local disk, gs:// or s3://"


def check_writable(prefix: str) -> str:
    """Create, replace and delete a small object under `prefix`, as publishing an output does.

    Returns what is weak about the store, though no output is lost by it. `InputError` when it
    cannot be written or lacks what the protocol needs.
    """
    folder = storage.join(prefix, f".write-check-{uuid.uuid4().hex}")
    if storage.is_local(prefix):
        _check_directory(storage.local_path(prefix), folder.rpartition("/")[2])
    with storage.giving_up_after(_CHECK_SECONDS):
        try:
            problem = _problem(url := storage.join(folder, "record"))
            if storage.is_local(prefix):
                storage.delete_tree(folder)
            else:
                fs, path = storage.filesystem(url)
                with contextlib.suppress(FileNotFoundError):  # deleted by an old version
                    fs.rm_file(path)
        except BaseException:
            with storage.giving_up_after(1.0), contextlib.suppress(OSError, PonenteError):
                storage.delete_tree(folder)
            raise
    if problem and problem != _ANY_DELETE:
        raise InputError(f"{prefix}: {problem}{_ELSEWHERE}")
    return problem


def _problem(url: str) -> str:
    missing = _NO_CREATE
    try:
        if not storage.create(url, b"first", durable=False):
            return "it reports an object where none was written"
        if storage.create(url, b"second", durable=False):
            return "its create is not conditional: a second create replaced the first object"
        found, version = storage.read_versioned(url)
        if found != b"first":
            return "its create is not conditional: a second create replaced the first object"
        missing = _NO_LOCK
        if not storage.replace_if(url, b"third", version):
            return "it refuses to replace the version of an object that was just read"
        if storage.read_bytes(url) != b"third":
            return "an overwritten object still reads as before"
        if storage.replace_if(url, b"fourth", version):
            return "its writes are not conditional: a version was replaced that is not the newest"
        if storage.replace_if(url, None, version):
            return _ANY_DELETE
    except OSError as error:
        cause = error.__context__
        if storage.is_local(url) and isinstance(cause, OSError) and cause.errno in _CANNOT:
            return missing.format(cause.strerror)
        raise
    return ""


def _check_directory(directory: str, name: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, name)
        with open(path, "xb") as file:
            file.write(b"ponente")
        os.unlink(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{directory}: expected a directory, found a file in the path") from error
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be written ({error.strerror}); choose another prefix or "
            "correct its permissions"
        ) from error


def bucket_warnings(prefix: str, region: str = "") -> list[str]:
    """Warnings about the gs:// bucket of `prefix` and machines in `region`, with what to do.

    None where the bucket cannot be read; `region` is empty if unknown.
    """
    about = _about(prefix) if prefix.startswith("gs://") else {}
    return [*filter(None, (_far(prefix, about, region), _kept(prefix, about)))]


def _far(prefix: str, about: Mapping[str, Any], region: str) -> str:
    location = str(about.get("location", "")).lower()
    if location in _CONTINENTS:
        far = not region.startswith(_CONTINENTS[location])
    else:
        # Two-region locations such as nam4 are not compared.
        far = bool(re.fullmatch(r"[a-z]+-[a-z]+\d+", location)) and location != region
    if not far or not region:
        return ""
    return (
        f"the bucket of {prefix} is in {location} and the machines are in {region}: every byte "
        f"between them is billed and slow; make a bucket in {region}"
    )


def _kept(prefix: str, about: Mapping[str, Any]) -> str:
    policy = about.get("softDeletePolicy") or {}
    days = int(policy.get("retentionDurationSeconds", 0)) / 86400
    if not days:
        return ""
    bucket = prefix.removeprefix("gs://").partition("/")[0]
    return (
        f"the bucket of {prefix} bills deleted objects for {days:g} more days, and every replaced "
        "checkpoint is one; turn that off: "
        f"gcloud storage buckets update gs://{bucket} --clear-soft-delete"
    )


def _about(url: str) -> dict[str, Any]:
    try:
        fs, path = storage.filesystem(url, _ABOUT_SECONDS)
        return dict(fs.call("GET", "b/{}", path.partition("/")[0], json_out=True))
    except (PonenteError, OSError):
        return {}  # permission for objects does not include the bucket's metadata
