"""Where documents come from, as one URL string.

A source is an fsspec glob of Parquet files (`./docs/*.parquet`, `gs://bucket/docs/*.parquet`,
`hf://datasets/owner/name@revision/*.parquet`) or the documentation that every CPython carries
(`python-docs://3.12.4`). A source names exact bytes: a hub dataset carries its revision, the
embedded text its Python version, so the string may stand in a step's identity.
Only the standard library is imported here: planning needs nothing more.
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
    """Source of the English text inside this Python: `data.embedded` says what it holds."""
    return f"{PYTHON_DOCS}{platform.python_version()}"


def is_embedded(source: str) -> bool:
    """Whether `source` is the documentation of a Python, which needs no file and no network."""
    return source.startswith(PYTHON_DOCS)
