"""English text that every Python contains, so that a first run needs no network.

About 2 MB: the topics of the language reference that `help()` shows, and the docstrings of the
standard library, one document per module in source order. The table depends on the Python build
only: files are visited in sorted order, and repeated docstrings are skipped. It is written once, as
a Parquet file in the user's cache, and read like any other file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import pydoc_data.topics
import re
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.read.local_digest import user_cache
from data.source import check_documentation

_ROW_GROUPS = 8  # so that it fans out like any source
_SHORTEST_DOCSTRING = 41
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_UNDERLINE = re.compile(r"^[ \t]*([*=\-~^#\"'+])\1{2,}[ \t]*$\n?", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*\.\. (?:_[^\n]*:|index::[^\n]*)$\n?", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def written(source: str) -> str:
    """Path of the file that a `python-docs://` URL names, written if this host has none."""
    check_documentation(source)
    build = f"{sys.version}\0{_library()}\0".encode() + Path(__file__).read_bytes()
    name = f"python-docs-{hashlib.blake2b(build, digest_size=8).hexdigest()}.parquet"
    folders = user_cache(), Path(tempfile.gettempdir(), f"ponente-{os.getuid()}")
    if there := next((folder / name for folder in folders if (folder / name).exists()), None):
        return str(there)
    try:
        return _write(folders[0], name)
    except OSError:  # a home that is read only
        return _write(folders[1], name)


def _write(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    table = documents()
    edges = [table.num_rows * index // _ROW_GROUPS for index in range(_ROW_GROUPS + 1)]
    kept: dict[str, Any] = {"compression": "zstd", "use_dictionary": False}
    with (
        tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file,
        pq.ParquetWriter(file, table.schema, write_page_checksum=True, **kept) as writer,
    ):
        for start, stop in pairwise(edges):
            writer.write_table(table.slice(start, stop - start))
    os.utime(file.name, (0, 0))  # a file's version is its time: the same on every host
    os.replace(file.name, folder / name)
    return str(folder / name)


@functools.cache
def documents() -> pa.Table:
    """Every document: `id` (string, unique), `text` (string, never empty) and `token_count`.

    The count (int64) is an estimate, UTF-8 bytes / 4 rounded.
    """
    found = [*_topics(), *module_documents(_library())]
    return pa.table(
        {
            "id": pa.array([name for name, _ in found], pa.string()),
            "text": pa.array([text for _, text in found], pa.string()),
            "token_count": pa.array(
                [round(len(text.encode("utf-8")) / 4) for _, text in found], pa.int64()
            ),
        }
    )


def clean_topic(text: str) -> str:
    """A topic without reStructuredText's underlines, labels and index entries."""
    text = _UNDERLINE.sub("", _DIRECTIVE.sub("", text))
    return _BLANK_LINES.sub("\n\n", text).strip()


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of one module's source in source order, cleaned, 41 characters or longer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the library's source
        tree = ast.parse(source)
    yield from _docstrings_under(tree)


def module_documents(library: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for path in _library_files(library):
        texts = []
        for text in docstrings(path.read_text(encoding="utf-8")):
            if text not in seen:
                seen.add(text)
                texts.append(text)
        if texts:
            yield f"Lib/{path.relative_to(library).as_posix()}", "\n\n".join(texts)


def _docstrings_under(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _WITH_DOCSTRING):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
        if len(text) >= _SHORTEST_DOCSTRING:
            yield text
    # Only these fields hold statements; skipping expressions avoids most of the tree.
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield from _docstrings_under(child)


def _topics() -> Iterator[tuple[str, str]]:
    for name, text in sorted(pydoc_data.topics.topics.items()):
        if cleaned := clean_topic(text):
            yield f"topics/{name}", cleaned


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_files(library: Path) -> list[Path]:
    """The importable modules of the library, sorted, without tests, idlelib and site-packages."""

    found: list[Path] = []
    for folder, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name.isidentifier() and name not in _SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.as_posix())
