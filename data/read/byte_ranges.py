"""Files of a source by byte range: on a local disk, the Hugging Face hub, gs:// or http(s)://.

`file_state` is what the store says of one file, and `open_ranges` opens it as a seekable, read-only
file that fetches exactly what is read, each read checked for its length and retried as
`data.read.retry` says; `data.read.listing` says which files a source has. A file must stay the same
while it is used: its size and its version (the hub's object id, an ETag, a generation) are those of
its first sight or it is an `InputError`.

On the hub bytes come through the session and URL of `HfFileSystem` in one request a time: its own
file would try each read six times before we see it fail.
"""

from __future__ import annotations

import functools
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from data.read.retry import Answered, NotThere, TryAgain, redact, run_with_timeout, with_retries
from pipeline.errors import InputError
from pipeline.store import storage

SILENCE_SECONDS = 60.0  # a connection that says nothing for so long is given up
_PIECE = 32 << 20  # what one failure can cost again
_KEPT = 1 << 20
WEB = ("http", "https")

# (start, stop, seconds left) -> bytes start .. stop - 1, or fewer.
Fetch = Callable[[int, int, float], bytes]


class FileState(NamedTuple):
    """What tells a file from what it may be changed to.

    Attributes:
        size: bytes.
        version: the hub's object id, an ETag, a generation, a local file's time of change; empty
            where the store says nothing.
    """

    size: int
    version: str = ""


def file_state(url: str) -> FileState:
    """The file's size and version, asked of the store.

    Raises:
        InputError: there is no such file (`NotThere`), is not permitted, or has no size.
        StorageError: the store does not answer.
    """
    fs, path = storage.filesystem(url)
    if isinstance(fs, LocalFileSystem):
        try:
            return _local_state(os.stat(path))
        except FileNotFoundError:
            raise NotThere(f"{url}: expected a file, found none; check the source") from None
    state = state_of(
        with_retries(url, lambda left: run_with_timeout(left, lambda: info(fs, path, left)))
    )
    if state is None:
        raise InputError(f"{redact(url)}: the server does not say the file's size; copy the file")
    return state


def open_ranges(url: str, state: FileState | None = None) -> IO[bytes]:
    """The file for reading by range; nothing is fetched before it is read.

    Args:
        url: of a file.
        state: of its first sight; None to ask now.

    Raises:
        InputError: it is not there, or changed since (also when read).
        StorageError: the store does not answer (also when read).
    """
    fs, path = storage.filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return _open_local(url, state)
    state = state or file_state(url)
    return RangeFile(url, state, _fetch(fs, path, url, state))  # type: ignore[return-value]


class RangeFile(io.RawIOBase):
    """A seekable, read-only file made of byte ranges.

    Every read returns all bytes asked for that the file has, or raises.
    """

    def __init__(self, url: str, state: FileState, fetch: Fetch) -> None:
        self._url, self._size, self._fetch = url, state.size, fetch
        self._position = 0
        self._kept = (0, b"")  # the last small read: a footer is looked at twice

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The next byte to read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the next byte to read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only at the end of the file."""
        stop = self._size if size is None or size < 0 else self._position + size
        stop = min(stop, self._size)
        begin, kept = self._kept
        if begin <= self._position < stop <= begin + len(kept):
            data = kept[self._position - begin : stop - begin]
            self._position = stop
            return data
        starts = range(self._position, stop, _PIECE)
        pieces = [self._piece(start, min(start + _PIECE, stop)) for start in starts]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if 0 < len(data) <= _KEPT:
            self._kept = (self._position, data)
        self._position = max(self._position, stop)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the file goes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _piece(self, start: int, stop: int) -> bytes:
        def once(left: float) -> bytes:
            data = self._fetch(start, stop, left)
            if len(data) == stop - start:
                return data
            if len(data) == self._size:
                raise _no_ranges(self._url)
            raise TryAgain(f"{len(data):,} bytes of {stop - start:,}")

        return with_retries(f"{self._url}: bytes {start}-{stop - 1}", once)


def changed(url: str) -> InputError:
    """The error for a file that is not what it was."""
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
    """The scheme of a filesystem's URLs."""
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def info(fs: Any, path: str, left: float) -> Mapping[str, Any]:
    """What the filesystem says of a file, within `left` seconds where it is a web server."""
    return _on_web(fs, fs._info, path, left) if protocol(fs) in WEB else fs.info(path)


def state_of(about: Mapping[str, Any]) -> FileState | None:
    """Size and version out of what a store says of a file; None where it does not say the size."""
    size = about.get("size")
    if size is None or about.get("partial") is False:
        return None
    if lfs := about.get("lfs"):
        return FileState(int(size), str(lfs["sha256"]))
    names = ("blob_id", "xet_hash", "generation", "ETag", "etag")
    return FileState(int(size), next((str(about[n]) for n in names if about.get(n)), ""))


def _local_state(stat: os.stat_result) -> FileState:
    return FileState(stat.st_size, str(stat.st_mtime_ns))


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
    # Reads nothing ahead: what is around the ids is text.
    file = fs.open(path, "rb", cache_type="none")

    def fetch(start: int, stop: int, left: float) -> bytes:
        file.seek(start)
        return file.read(stop - start)

    return fetch


def _fetch_google(fs: Any, path: str, url: str, state: FileState, start: int, stop: int) -> bytes:
    condition = {"ifGenerationMatch": state.version} if state.version else {}
    try:
        return fs.call("GET", fs.url(path), headers=_range(start, stop), **condition)[1]
    except FileExistsError:  # how gcsfs reads 412, a precondition that does not hold
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
    """What a coroutine of fsspec's gives, with aiohttp's timeouts."""
    import aiohttp

    silence = min(SILENCE_SECONDS, left)
    timeout = aiohttp.ClientTimeout(total=left, sock_connect=silence, sock_read=silence)
    return sync(fs.loop, functools.partial(call, path, timeout=timeout, **options))


class _HubFile:
    """One file of a repository on the hub."""

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
        """Bytes start .. stop - 1 by one request, without another try."""
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
                    raise TryAgain(f"more bytes than the {stop - start:,} asked for")
        return bytes(data)

    def _check(self, response: Any, start: int) -> None:
        """That these are the bytes of the same file."""
        if response.status_code == 206:
            found = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", "")
            )
            if not found or int(found[1]) != start:
                raise TryAgain("an answer about other bytes")
            if int(found[2]) != self._state.size:
                raise changed(self._url)
        # Where the hub sends us on, the tag it gives the file itself is on one of those answers.
        answers = (*response.history, response)
        tags = [r.headers["x-linked-etag"] for r in answers if "x-linked-etag" in r.headers]
        tag = (tags or [response.headers.get("etag", "")])[0].removeprefix("W/").strip('"')
        known = self._tag or self._state.version
        # An object id, as is known of the file, is compared with one only.
        if tag and known and tag != known and (self._tag or len(tag) == len(known)):
            raise changed(self._url)
        self._tag = tag
