"""Where documents come from, as one URL string.

A source is a file, a folder or a pattern of files, or the text inside this Python. Files are
Parquet, JSON lines (`.jsonl`, `.ndjson`, `.json`; plain, `.gz`, `.zst`), Arrow (`.arrow`, as the
caches of `datasets` are) or text, one document a file. Of a folder, with all below it, and of a
pattern that ends in `*`, those files are read whose names say that they are such.

- `./docs`, `./docs/*.jsonl.zst`, `/data/*/x.parquet`: on a disk that every worker sees.
- `gs://bucket/docs/*.parquet`: on Google Cloud Storage.
- `hf://datasets/owner/name@<commit>/data/*.parquet`: on the Hugging Face hub. HF_TOKEN opens what
  is private or gated; HF_ENDPOINT names a mirror. Without `@<commit>` the branch `main` is read.
- `https://host/docs/x.parquet`, or `https://host/docs/*.parquet` where the server lists the folder.
  The address stands in records and logs, so it must hold no password and no signature.
- `python-docs://3.12.4`: the documentation that every CPython carries.

A full commit of the hub and the version of a Python name exact bytes. Whatever else a source names
can change under its name: `data.read.listing` says what a path, a pattern or a branch stands for
now, and a step that takes a source is stale when its output was made from something else. Only the
standard library is imported here.
"""

from __future__ import annotations

import platform
import re

from pipeline.errors import InputError

FINEWEB_EDU_REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
PYTHON_DOCS = "python-docs://"

_SAMPLES = {
    "sample-10BT": "sample/10BT/*.parquet",
    "sample-100BT": "sample/100BT/*.parquet",
    "sample-350BT": "sample/350BT/*.parquet",
    "default": "data/*/*.parquet",
}


def fineweb_edu(subset: str = "sample-10BT", revision: str = FINEWEB_EDU_REVISION) -> str:
    """Source of FineWeb-edu (Penedo et al. 2024, arXiv:2406.17557) at one revision of the hub.

    Args:
        subset: `sample-10BT`, `sample-100BT`, `sample-350BT`, `default` (every dump), or the name
            of one Common Crawl dump such as `CC-MAIN-2024-10`.
        revision: commit of the dataset repository, 40 hexadecimal digits.

    Raises:
        InputError: an unknown subset, or a revision that can move (a branch, a short hash).
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise InputError(
            f"fineweb_edu: revision={revision!r} is not a full commit hash (40 hexadecimal "
            "digits); a branch can move, so give the commit it points to"
        )
    files = _SAMPLES.get(subset)
    if files is None and re.fullmatch(r"CC-MAIN-\d{4}-\d{2}", subset):
        files = f"data/{subset}/*.parquet"
    if files is None:
        raise InputError(
            f"fineweb_edu: subset={subset!r} is unknown; use one of {', '.join(_SAMPLES)}, "
            "or a dump such as 'CC-MAIN-2024-10'"
        )
    return f"hf://datasets/HuggingFaceFW/fineweb-edu@{revision}/{files}"


def python_documentation() -> str:
    """Source of the English text inside this Python: `data.read.python_docs` says what it holds."""
    return f"{PYTHON_DOCS}{platform.python_version()}"


def is_embedded(source: str) -> bool:
    """Whether `source` is the documentation of a Python, which needs no file and no network."""
    return source.startswith(PYTHON_DOCS)


def check_embedded(source: str) -> None:
    """Raise `InputError` unless `source` is the documentation of the Python that runs now."""
    asked, running = source.removeprefix(PYTHON_DOCS), platform.python_version()
    if asked != running:
        raise InputError(
            f"source {source!r}: the text inside Python {asked} was asked for, but this is Python "
            f"{running}; run with Python {asked}, or use python_documentation() for this one"
        )
