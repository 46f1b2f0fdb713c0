"""Reads byte ranges of source files on a local disk, the Hugging Face hub, gs:// or http(s)://.

Every read is checked for its length and retried by `data.read.retry`. A size or version (the hub's
object id, an ETag, a generation) other than the first one seen is an `InputError`.

Hub files are read through the session of `huggingface_hub`, because the file object of
`HfFileSystem` retries each read six times before it reports an error.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping
from stat import S_ISREG
from typing import IO, Any, NamedTuple

from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from data.read.retry import Answered, NotThere, TryAgain, redact, with_retries
from data.source import PYTHON_DOCS
from pipeline.errors import InputError
from pipeline.store import storage

SILENCE_SECONDS = 60.0  # timeout of a connection that sends nothing
_PIECE = 32 << 20  # bytes per request: the most that one retry fetches again
WEB = ("http", "https")

# (start, stop, seconds left) -> bytes start .. stop - 1, or fewer.
Fetch = Callable[[int, int, float], bytes]


class FileState(NamedTuple):
    """A file's size and version, by which a change is detected."""

    size: int
    version: str = ""  # the hub's object id, an ETag, a generation, or a local file's time


def file_state(url: str) -> FileState:
    """The file's current size and version in the store."""
    fs, path = storage.filesystem(_address(url))
    if isinstance(fs, LocalFileSystem):
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            raise NotThere(f"{url}: expected a file, found none; check the source") from None
        if not S_ISREG(stat.st_mode):
            raise InputError(
                f"{url}: expected a file, found a pipe or a device; write a file of it"
            )
        return _local_state(stat)
    state = state_of(with_retries(url, lambda left: info(fs, path, left), blocks=True))
    if state is None:
        raise InputError(f"{redact(url)}: the server does not give the file's size; copy the file")
    return state


def open_ranges(url: str, state: FileState | None = None) -> IO[bytes]:
    """The file for reading by range; opening it fetches no content.

    A state other than `state` is refused (also when read); None stands for the current one.
    """
    fs, path = storage.filesystem(_address(url))
    if isinstance(fs, LocalFileSystem):
        return _open_local(path, state)
    state = state or file_state(url)
    return RangeFile(url, state, _fetch(fs, path, url, state))  # type: ignore[return-value]


class RangeFile(AbstractBufferedFile):
    """A seekable, read-only file over byte-range requests.

    Every read returns all requested bytes up to the end of the file, or raises.
    """

    def __init__(self, url: str, state: FileState, fetch: Fetch) -> None:
        # No read-ahead: the bytes around a range of ids are text that is not needed.
        super().__init__(None, url, size=state.size, cache_type="none")
        self._fetch = fetch

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        starts = range(start, end, _PIECE)
        pieces = [self._piece(begin, min(begin + _PIECE, end)) for begin in starts]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, start: int, stop: int) -> bytes:
        def once(left: float) -> bytes:
            data = self._fetch(start, stop, left)
            if len(data) == stop - start:
                return data
            if len(data) == self.size:
                raise _no_ranges(self.path)
            raise TryAgain(f"{len(data):,} bytes of {stop - start:,}")

        return with_retries(f"{self.path}: bytes {start}-{stop - 1}", once)


def changed(url: str) -> InputError:
    return InputError(
        f"{redact(url)}: the source changed while it was read; pin a revision "
        "(hf://datasets/owner/name@<commit>/...) or leave the files as they are, and run again"
    )


def _no_ranges(url: str) -> InputError:
    return InputError(
        f"{redact(url)}: the server sends whole files and no ranges; "
        "copy the file and give its path"
    )


def protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def info(fs: Any, path: str, left: float) -> Mapping[str, Any]:
    """The filesystem's metadata of a file; from a web server within `left` seconds."""
    return _on_web(fs, fs._info, path, left) if protocol(fs) in WEB else fs.info(path)


def state_of(about: Mapping[str, Any]) -> FileState | None:
    """Size and version from a store's metadata of a file; None if it has no size."""
    size = about.get("size")
    if size is None or about.get("partial") is False:
        return None
    if lfs := about.get("lfs"):
        return FileState(int(size), str(lfs["sha256"]))
    names = ("blob_id", "xet_hash", "generation", "ETag", "etag")
    return FileState(int(size), next((str(about[n]) for n in names if about.get(n)), ""))


def _local_state(stat: os.stat_result) -> FileState:
    return FileState(stat.st_size, str(stat.st_mtime_ns))


def _address(url: str) -> str:
    """Where to read a URL: the documentation inside this Python is a file in the user's cache."""
    if not url.startswith(PYTHON_DOCS):
        return url
    from data.read import python_docs

    return python_docs.written(url)


def _open_local(url: str, state: FileState | None) -> IO[bytes]:
    try:
        file = storage.open_read(url)
    except FileNotFoundError:
        raise NotThere(f"{url}: expected a file, found none; check the source") from None
    if state is not None and _local_state(os.fstat(file.fileno())) != state:
        file.close()
        raise changed(url)
    return file


def _fetch(fs: Any, path: str, url: str, state: FileState) -> Fetch:
    scheme = protocol(fs)
    if scheme == "hf" and not path.startswith("buckets/"):
        return _HubFile(fs, path, url, state).fetch
    if scheme in WEB:
        return lambda start, stop, left: _fetch_web(fs, path, state, start, stop, left)
    if scheme == "gs":
        return lambda start, stop, left: _fetch_google(fs, path, url, state, start, stop)
    file = fs.open(path, "rb", cache_type="none")

    def fetch(start: int, stop: int, left: float) -> bytes:
        file.seek(start)
        return file.read(stop - start)

    return fetch


def _fetch_google(fs: Any, path: str, url: str, state: FileState, start: int, stop: int) -> bytes:
    condition = {"ifGenerationMatch": state.version} if state.version else {}
    try:
        return fs.call("GET", fs.url(path), headers=_range(start, stop), **condition)[1]
    except FileExistsError:  # gcsfs raises it for 412, a failed precondition
        raise changed(url) from None


def _fetch_web(fs: Any, path: str, state: FileState, start: int, stop: int, left: float) -> bytes:
    headers = {**_range(start, stop), "Accept-Encoding": "identity"}
    if state.version and not state.version.startswith("W/"):
        headers["If-Match"] = state.version
    try:
        return _on_web(fs, fs._cat_file, path, left, start=start, end=stop, headers=headers)
    except Exception as error:
        if getattr(error, "status", None) in (412, 416):
            raise changed(path) from None
        raise


def _range(start: int, stop: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}"}


def _on_web(fs: Any, call: Callable[..., Any], path: str, left: float, **options: Any) -> Any:
    """The result of a coroutine of fsspec's HTTP filesystem, with aiohttp's timeouts."""
    import aiohttp

    silence = min(SILENCE_SECONDS, left)
    timeout = aiohttp.ClientTimeout(total=left, sock_connect=silence, sock_read=silence)
    return sync(fs.loop, functools.partial(call, path, timeout=timeout, **options))


class _HubFile:
    def __init__(self, fs: Any, path: str, url: str, state: FileState) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import parse_hf_uri

        place = parse_hf_uri(f"hf://{path}")
        self._address = hf_hub_url(
            place.id,
            place.path_in_repo,
            repo_type=place.type,
            revision=place.revision,
            endpoint=fs.endpoint,
        )
        self._token, self._url, self._state = fs.token, url, state
        self._tag = ""

    def fetch(self, start: int, stop: int, left: float) -> bytes:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers

        headers = {
            **build_hf_headers(token=self._token),
            **_range(start, stop),
            "Accept-Encoding": "identity",
        }
        end = time.monotonic() + left
        silence = min(SILENCE_SECONDS, left)
        with get_session().stream(
            "GET", self._address, headers=headers, timeout=silence, follow_redirects=True
        ) as response:
            if response.status_code == 416:
                raise changed(self._url)
            if response.status_code not in (200, 206):
                raise Answered(response.status_code, response.headers)
            if response.status_code == 200 and stop - start < self._state.size:
                raise _no_ranges(self._url)
            self._check(response, start)
            data = bytearray()
            for piece in response.iter_bytes():
                data += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"{len(data):,} bytes in {left:.1f} s")
                if len(data) > stop - start:
                    raise TryAgain(f"more than the {stop - start:,} bytes requested")
        return bytes(data)

    def _check(self, response: Any, start: int) -> None:
        """Raise unless the response has the requested bytes of the same version of the file."""
        if response.status_code == 206:
            found = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", "")
            )
            if not found or int(found[1]) != start:
                raise TryAgain("a response with another byte range")
            if int(found[2]) != self._state.size:
                raise changed(self._url)
        # If the hub redirects, one of its responses has the tag of the file itself.
        answers = (*response.history, response)
        tags = [r.headers["x-linked-etag"] for r in answers if "x-linked-etag" in r.headers]
        tag = (tags or [response.headers.get("etag", "")])[0].removeprefix("W/").strip('"')
        known = self._tag or self._state.version
        # `version` is an object id: compare it only with a tag of the same length, not with others.
        if tag and known and tag != known and (self._tag or len(tag) == len(known)):
            raise changed(self._url)
        self._tag = tag
