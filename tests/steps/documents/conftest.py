"""Documents that functions filter and change."""

from __future__ import annotations

import json

import pytest

TEXTS = [f"text {n} " + "word " * (n % 7) + ("café" if n % 5 == 0 else "") for n in range(300)]
URLS = [f"https://{'spam' if n % 11 == 0 else 'ham'}.example/{n}" for n in range(300)]


@pytest.fixture
def source(tmp_path):
    """JSON lines and Parquet with another column."""
    folder = tmp_path / "source"
    folder.mkdir()
    lines = [
        json.dumps({"id": f"d{n}", "text": text, "url": url, "n": n}) + "\n"
        for n, (text, url) in enumerate(zip(TEXTS, URLS, strict=True))
    ]
    for part in range(2):
        (folder / f"{part}.jsonl").write_text("".join(lines[part * 150 : part * 150 + 150]))
    return str(folder)
