"""The index of a checkpoint: what is in it, and the proof that it is still there.

`index.json` is written after everything else. It lists the step, every array (axes, shape, dtype)
and every file (size, SHA-256), and carries a digest of itself. TensorStore's checksums alone do not
catch every flipped bit or exchanged file; comparing with the index does, before a value is used.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline import storage
from pipeline.errors import DamagedOutput
from pipeline.fingerprint import digest

INDEX = "index.json"
HISTORY = "history.json"
ARRAYS = "arrays"


def write_index(path: str, step: int, leaves: dict[str, Any]) -> None:
    """Describe the finished files under `path`; reads all of them back once."""
    files = [
        {"name": name, "size": size, "sha256": storage.sha256(storage.join(path, name))}
        for name, size in storage.list_files(path)
        if name != INDEX
    ]
    content = {"step": step, "leaves": leaves, "files": files}
    document = {"content": content, "sha256": digest(content)}
    storage.write_atomic(storage.join(path, INDEX), json.dumps(document).encode())


def read_index(path: str) -> dict[str, Any]:
    """The index of the checkpoint at `path`.

    Raises:
        DamagedOutput: when it is missing, torn or changed.
    """
    url = storage.join(path, INDEX)
    try:
        document = storage.read_json(url)
        content = document["content"]
        sound = document["sha256"] == digest(content)
    except FileNotFoundError as error:
        raise DamagedOutput(f"{url}: the checkpoint's index is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedOutput(f"{url}: the checkpoint's index is not readable: {error}") from error
    if not sound:
        raise DamagedOutput(f"{url}: the checkpoint's index differs from its own digest")
    return content


def verify_files(path: str, index: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Compare every `parts`-th file of the checkpoint, from `part` on, with the index.

    Raises:
        DamagedOutput: naming the first file that is missing, or has another size or content.
    """
    for entry in index["files"][part::parts]:
        url = storage.join(path, entry["name"])
        size = storage.size(url)
        if size is None:
            raise DamagedOutput(f"{url}: this file of the checkpoint is missing")
        if size != entry["size"]:
            raise DamagedOutput(f"{url}: expected {entry['size']} bytes, found {size}")
        if storage.sha256(url) != entry["sha256"]:
            raise DamagedOutput(f"{url}: content differs from the SHA-256 in {INDEX}")
