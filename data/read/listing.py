"""Lists the current files of a source with digests, which change with content and not with place.

The digest of a file is the best that its store gives without sending the file. A full hub commit
and the documentation are pinned and need no request. Planning imports this module, so it imports
store clients only when needed.
"""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from data.read.byte_ranges import WEB, FileState, file_state, info, protocol, state_of
from data.read.formats import READ, is_document_file, kind_by_name
from data.read.local_digest import digest_files
from data.read.retry import redact, with_retries
from data.source import PYTHON_DOCS, check_documentation
from pipeline.errors import InputError
from pipeline.identity.listing import ListedFile, Listing
from pipeline.store import storage

_DOCUMENTATION_BYTES = 8_000_000  # more than the documentation of any supported Python
_AT_ONCE = 16
_PINNED = re.compile(r"hf://(?:[a-z]+/)?[^/@]+/[^/@]+@([0-9a-f]{40})(?:/|$)")
# Metadata fields that identify a file's content, the most reliable first.
_CONTENT = ("md5Hash", "crc32c", "blob_id", "ETag", "etag", "generation", "Last-Modified")

_Match = tuple[str, Mapping[str, Any] | None]
Accept = Callable[[str], bool]


def absolute(source: Any) -> Any:
    """`source` with a relative local path made absolute."""
    if not isinstance(source, str) or not source or not storage.is_local(source):
        return source
    return storage.local_path(source)


def find_files(
    source: str, accept: Accept = is_document_file
) -> list[tuple[str, FileState | None]]:
    """(URL, state) of every file of a source, sorted by name; None if the listing has no state.

    Args:
        accept: whether to read a file in a folder, or of a pattern that ends in *, by its name.
    """
    if source.startswith(PYTHON_DOCS):
        return [(source, file_state(source))]
    fs, _, matches, _ = _find(source, None, accept)
    if isinstance(fs, LocalFileSystem):
        return [(name, file_state(name)) for name, _ in matches]
    return [
        (fs.unstrip_protocol(name), None if about is None else state_of(about))
        for name, about in matches
    ]


def list_source(source: str, seconds: float, accept: Accept = is_document_file) -> Listing:
    """The current files of a source, with digests as the module docstring describes.

    Args:
        seconds: deadline of requests to the store. Digesting local files has no deadline.
    """
    if source.startswith(PYTHON_DOCS):
        check_documentation(source)
        version = source.removeprefix(PYTHON_DOCS)
        return Listing(source, pinned=f"Python {version}", limit=_DOCUMENTATION_BYTES)
    if found := _PINNED.match(source):
        return Listing(source, pinned=f"commit {found[1]}")
    branch = revision = ""
    place = source
    if source.startswith("hf://"):
        place, branch, revision = _resolve_branch(source, seconds)
    fs, path, matches, skipped = _find(place, seconds, accept)
    root = _root(fs, path)
    names = [name.removeprefix(root) for name, _ in matches]
    if isinstance(fs, LocalFileSystem):
        files = _local_files(dict(zip(names, dict(matches), strict=True)))
    else:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            files = tuple(
                pool.map(lambda name, match: _remote_file(fs, name, match, seconds), names, matches)
            )
    return Listing(
        redact(source),
        files,
        branch=branch,
        revision=revision,
        skipped=tuple(name.removeprefix(root) for name in skipped),
    )


def list_documents(source: str, seconds: float) -> Listing:
    """As `list_source`, and refuses a file whose extension is that of an unsupported format."""
    listing = list_source(source, seconds)
    for name in [file.name for file in listing.files] or [source]:
        kind_by_name(name)
    return listing


def list_folder(path: str, seconds: float) -> Listing:
    """The files of a local folder, recursively, without hidden ones and `__pycache__`."""
    del seconds
    if not os.path.isdir(path):
        raise InputError(f"expected a folder, found none at {path}; check the path")
    found = {}
    for directory, inner, names in os.walk(path):
        inner[:] = [n for n in inner if not n.startswith(".") and n != "__pycache__"]
        for name in names:
            if not name.startswith("."):
                file = os.path.join(directory, name)
                found[os.path.relpath(file, path)] = file
    return Listing(path, _local_files(found))


def _local_files(paths: Mapping[str, str]) -> tuple[ListedFile, ...]:
    digests = digest_files(paths.values())
    return tuple(ListedFile(name, *digests[path]) for name, path in sorted(paths.items()))


def _remote_file(fs: Any, name: str, match: _Match, seconds: float) -> ListedFile:
    path, about = match
    if about is None:
        url = fs.unstrip_protocol(path)
        about = with_retries(url, lambda left: info(fs, path, left), seconds, blocks=True)
    if lfs := about.get("lfs"):
        digest = f"sha256 {lfs['sha256']}"
    else:
        digest = next((f"{kind} {about[kind]}" for kind in _CONTENT if about.get(kind)), "")
    return ListedFile(name, int(about.get("size") or 0), digest)


def _find(
    source: str, seconds: float | None, accept: Accept
) -> tuple[Any, str, list[_Match], list[str]]:
    """(filesystem, path in it, matching files sorted by name, skipped matches) of a source."""
    if re.match(r"https?://[^/]*@", source):
        raise InputError(
            f"source {redact(source)!r}: the address holds a login, which records and logs would "
            "show; use an address that may be read without one"
        )
    end = None if seconds is None else time.monotonic() + seconds
    if seconds is None or storage.is_local(source):
        fs, path = storage.filesystem(source)
    else:
        # The gs:// client would search longer for a login. A shorter limit for the client, so
        # that its own error arrives before the timeout.
        limit = 0.8 * seconds
        fs, path = with_retries(
            f"source {source!r}", lambda _: storage.filesystem(source, limit), seconds, blocks=True
        )
    path = _named(fs, path)
    if not isinstance(fs, LocalFileSystem):
        fs.invalidate_cache()
    files, folders = with_retries(
        f"source {source!r}",
        lambda left: _matches(fs, path, left, accept),
        None if end is None else max(end - time.monotonic(), 1.0),
        blocks=True,
    )
    if not files:
        found = f", but {len(folders)} folders or other files do" if folders else ""
        raise InputError(
            f"source {redact(source)!r}: no file matches{found}; check the address and the pattern "
            f"(a folder or a pattern that ends in * reads {READ} by name)"
        )
    return fs, path, sorted(files, key=lambda match: match[0]), sorted(folders)


def _matches(fs: Any, path: str, left: float, accept: Accept) -> tuple[list[_Match], list[str]]:
    if not _is_pattern(fs, path):
        about = _unless_missing(lambda: info(fs, path, left))
        if about is not None and about.get("type") == "directory":
            found = fs.find(path, detail=True)
            return _accepted(path, list(found.items()), [], accept)
        return ([] if about is None else [(path, about)]), []
    if protocol(fs) in WEB:
        return [(name, None) for name in _web_glob(fs, path)], []
    found = _unless_missing(lambda: fs.glob(path, detail=True)) or {}
    folders = [name for name, about in found.items() if about.get("type") == "directory"]
    files = [(name, about) for name, about in found.items() if name not in set(folders)]
    if not path.endswith("*"):
        return files, folders
    inside = {name.rpartition("/")[0] for name, _ in files}
    folders = [name for name in folders if "**" not in path or name not in inside]
    return _accepted(_root(fs, path), files, folders, accept)


def _accepted(
    root: str, files: list[_Match], skipped: list[str], accept: Accept
) -> tuple[list[_Match], list[str]]:
    """(files that `accept` accepts, `skipped` and the other files)."""
    prefix = f"{root.rstrip('/')}/"
    wanted = [match for match in files if accept(match[0].removeprefix(prefix))]
    read = {name for name, _ in wanted}
    return wanted, [*skipped, *(name for name, _ in files if name not in read)]


def _unless_missing(ask: Callable[[], Any]) -> Any:
    """The result of `ask()`; None if the file does not exist."""
    try:
        return ask()
    except FileNotFoundError as error:
        if error.__cause__ is None:
            return None
        raise


def _web_glob(fs: Any, path: str) -> list[str]:
    """The matching links of a page; fsspec's own glob reads a failure as an empty folder."""
    folder, _, pattern = path.rpartition("/")
    if _is_pattern(fs, folder):
        raise InputError(
            f"source {redact(path)!r}: over http only the last part may be a pattern; "
            "give one source for each folder"
        )
    found = fs.ls(f"{folder}/", detail=False)
    return sorted(name for name in set(found) if fnmatchcase(name.rpartition("/")[2], pattern))


def _is_pattern(fs: Any, path: str) -> bool:
    there = isinstance(fs, LocalFileSystem) and os.path.lexists(path)
    return bool(set(path) & set(_magic(fs))) and not there


def _named(fs: Any, path: str) -> str:
    """The path, in which a local folder's own name is no pattern; refused if it is also one."""
    if not isinstance(fs, LocalFileSystem) or not set(path) & set(_magic(fs)):
        return path
    known = path
    while not os.path.lexists(known):
        known = os.path.dirname(known)
    if not set(known) & set(_magic(fs)):
        return path
    there, rest = glob.escape(known), path.removeprefix(known)
    if others := set(fs.glob(path)) - set(fs.glob(there + rest)):
        raise InputError(
            f"source {path!r}: {known!r} exists, and as a pattern it matches others too, such as "
            f"{min(others)!r}; rename it, or give the folder"
        )
    return there + rest if rest else path


def _magic(fs: Any) -> str:
    # In an http(s) URL, "?" begins the query.
    return "*[" if protocol(fs) in WEB else "*?["


def _root(fs: Any, path: str) -> str:
    """The common prefix of a path's matches, up to a slash; for a folder, the folder itself."""
    if not _is_pattern(fs, path) and protocol(fs) not in WEB and fs.isdir(path):
        return f"{path.rstrip('/')}/"
    fixed = re.split(f"[{re.escape(_magic(fs))}]", path, maxsplit=1)[0]
    return fixed[: fixed.rfind("/") + 1]


def _resolve_branch(source: str, seconds: float) -> tuple[str, str, str]:
    """(the source pinned to the commit of its branch, branch, commit)."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import parse_hf_uri

    fs, path = storage.filesystem(source)
    if path.startswith("buckets/"):
        return source, "", ""

    def ask(left: float) -> Any:
        place = parse_hf_uri(f"hf://{path}")
        api = HfApi(endpoint=fs.endpoint, token=fs.token)
        return place, api.repo_info(
            place.id, repo_type=place.type, revision=place.revision, timeout=left
        ).sha

    place, commit = with_retries(f"source {source!r}", ask, seconds, blocks=True)
    kind = {"dataset": "datasets/", "space": "spaces/"}.get(place.type, "")
    pinned = f"hf://{kind}{place.id}@{commit}/{place.path_in_repo}"
    return pinned, place.revision or "main", commit
