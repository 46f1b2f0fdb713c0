"""Where documents come from, as one URL string.

A source is a file, a folder, a glob pattern, or the documentation inside this Python. Files are
Parquet, JSON lines (`.jsonl`, `.ndjson`, `.json`; plain, `.gz`, `.zst`), Arrow (`.arrow`, the
format of the `datasets` cache) or text with one document per file. A folder is read recursively; in
a folder, and for a pattern that ends in `*`, only files with one of these extensions are read.

- `./docs`, `./docs/*.jsonl.zst`, `/data/*/x.parquet`: on a disk that every worker can read.
- `gs://bucket/docs/*.parquet`: on Google Cloud Storage.
- `hf://datasets/owner/name@<commit>/data/*.parquet`: on the Hugging Face hub. HF_TOKEN gives access
  to private and gated repositories; HF_ENDPOINT names a mirror. Without `@<commit>` the branch
  `main` is read.
- `https://host/docs/x.parquet`, or `https://host/docs/*.parquet` where the server lists the folder.
  The URL is written to records and logs, so it must hold no password and no signature.
- `python-docs://3.12.4`: the documentation that every CPython contains.

A full hub commit and a Python version each identify exact bytes. Any other source can change under
the same name: `data.read.listing` lists its current files, and a step's output is stale when they
differ from those it was built from. `data.sources` has public data sets by name.
"""

from __future__ import annotations

import platform

from data.sources import named_source
from pipeline.errors import InputError

PYTHON_DOCS = "python-docs://"


def fineweb_edu(subset: str = "sample-10BT", revision: str | None = None) -> str:
    """Source of FineWeb-edu (Penedo et al. 2024, arXiv:2406.17557) at one revision of the hub.

    Args:
        subset: `sample-10BT`, `sample-100BT`, `sample-350BT`, `default` (every dump), or the name
            of one Common Crawl dump such as `CC-MAIN-2024-10`.
        revision: commit of the dataset repository, 40 hexadecimal digits.
    """
    return named_source("fineweb-edu", subset, revision)


def python_documentation() -> str:
    """Source of the English text inside this Python, which `data.read.python_docs` describes."""
    return f"{PYTHON_DOCS}{platform.python_version()}"


def check_documentation(source: str) -> None:
    """Raise `InputError` unless `source` is the documentation of the running Python."""
    asked, running = source.removeprefix(PYTHON_DOCS), platform.python_version()
    if asked != running:
        raise InputError(
            f"source {source!r}: it is the text inside Python {asked}, but this is Python "
            f"{running}; run with Python {asked}, or use python_documentation() for this one"
        )
