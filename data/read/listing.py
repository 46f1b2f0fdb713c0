"""Lists the current files of a source with digests, which change with content and not with place.

The digest of a file is the best that its store gives without sending the file. A full hub commit
and the documentation are pinned and need no request. Planning imports this module, so it imports
store clients only when needed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
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

_About = Mapping[str, Any]
_Match = tuple[str, _About]
Accept = Callable[[str], bool]


def absolute(source: Any) -> Any:
    """`source` with a relative local path made absolute."""
    if not isinstance(source, str) or not source or not storage.is_local(source):
        return source
    return storage.local_path(source)


def find_files(source: str, accept: Accept = is_document_file) -> list[tuple[str, FileState]]:
    """(URL, state) of every file of a source, sorted by name.

    Of a folder, or a pattern that ends in *, only those whose names `accept` accepts.
    """
    if source.startswith(PYTHON_DOCS):
        return [(source, file_state(source))]
    fs, _, matches, _ = _find(source, None, accept)
    if isinstance(fs, LocalFileSystem):
        return [(name, file_state(name)) for name, _ in matches]
    urls = [(fs.unstrip_protocol(name), about) for name, about in matches]
    return [(url, state_of(url, about)) for url, about in urls]


def list_source(source: str, seconds: float, accept: Accept = is_document_file) -> Listing:
    """The current files of a source, listed within `seconds`, and their digests.

    Digesting local files has no deadline; `accept` is as for `find_files`.
    """
    if source.startswith(PYTHON_DOCS):
        check_documentation(source)
        version = source.removeprefix(PYTHON_DOCS)
        return Listing(source, pinned=f"Python {version}", limit=_DOCUMENTATION_BYTES)
    if found := _PINNED.match(source):
        return Listing(source, pinned=f"commit {found[1]}")
    place, branch, revision = source, "", ""
    if source.startswith("hf://"):
        place, branch, revision = _resolve_branch(source, seconds)
    fs, path, matches, skipped = _find(place, seconds, accept)
    root = _root(fs, path)
    found = {name.removeprefix(root): (name, about) for name, about in matches}
    if isinstance(fs, LocalFileSystem):
        files = _local_files({name: path for name, (path, _) in found.items()})
    else:
        files = tuple(_remote_file(name, about) for name, (_, about) in found.items())
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


def _remote_file(name: str, about: _About) -> ListedFile:
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

    def look(left: float) -> tuple[Any, str, list[_Match], list[str]]:
        # The gs:// client would search longer for a login. A shorter limit for the client, so
        # that its own error arrives before the timeout.
        fs, path = storage.filesystem(source, None if seconds is None else 0.8 * seconds)
        path = _named(fs, path)
        if not isinstance(fs, LocalFileSystem):
            fs.invalidate_cache()
        return fs, path, *_matches(fs, path, left, accept)

    fs, path, files, folders = with_retries(f"source {source!r}", look, seconds, blocks=True)
    if not files:
        found = f", but {len(folders)} folders or other files do" if folders else ""
        raise InputError(
            f"source {redact(source)!r}: no file matches{found}; check the address and the pattern "
            f"(a folder or a pattern that ends in * reads {READ} by name)"
        )
    return fs, path, sorted(files, key=lambda match: match[0]), sorted(folders)


def _matches(fs: Any, path: str, left: float, accept: Accept) -> tuple[list[_Match], list[str]]:
    """(files to read, other files and folders that match)."""
    if not _is_pattern(fs, path):
        about = _unless_missing(lambda: info(fs, path, left))
        by_name = about is not None and about.get("type") == "directory"
        found = {} if about is None else {path: about}
        if by_name:
            found = fs.find(path, detail=True)
    elif protocol(fs) in WEB:
        return _web_glob(fs, path, left), []
    else:
        found = _unless_missing(lambda: fs.glob(path, detail=True)) or {}
        by_name = path.endswith("*")
    skipped = [name for name, about in found.items() if about.get("type") == "directory"]
    files = {name: found[name] for name in found.keys() - set(skipped)}
    if by_name:
        if "**" in path:  # went into the folders
            inside = {name.rpartition("/")[0] for name in files}
            skipped = [name for name in skipped if name not in inside]
        prefix = _root(fs, path)
        unread = [name for name in files if not accept(name.removeprefix(prefix))]
        files = {name: files[name] for name in files.keys() - set(unread)}
        skipped += unread
    return list(files.items()), skipped


def _unless_missing(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except FileNotFoundError as error:
        if error.__cause__ is None:
            return None
        raise


def _web_glob(fs: Any, path: str, left: float) -> list[_Match]:
    """The matching links of a page; fsspec's own glob reads a failure as an empty folder."""
    folder, _, pattern = path.rpartition("/")
    if _is_pattern(fs, folder):
        raise InputError(
            f"source {redact(path)!r}: over http only the last part may be a pattern; "
            "give one source for each folder"
        )
    found = set(fs.ls(f"{folder}/", detail=False))
    names = [name for name in found if fnmatchcase(name.rpartition("/")[2], pattern)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        abouts = pool.map(lambda name: with_retries(name, partial(info, fs, name), left), names)
        return list(zip(names, abouts, strict=True))


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
