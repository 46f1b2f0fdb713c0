"""`python -m steps.compare` on directories of runs, whole and in the middle of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines(path, entries):
    """A `metrics.jsonl` in the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"time": 0, **each}) + "\n" for each in entries)
    (path / "metrics.jsonl").write_text(text)


def steps(*numbers, loss=1.0):
    return [{"kind": "step", "step": n, "loss": loss * n, "tokens": 10} for n in numbers]


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "steps.compare", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_the_command_writes_the_page_of_two_runs(tmp_path):
    """It runs as a module, and says where the page is."""
    lines(tmp_path / "one", steps(1, 2))
    lines(tmp_path / "two", steps(1, 2, 3))
    page = tmp_path / "page.html"
    done = command(f"a={tmp_path / 'one'}", f"b={tmp_path / 'two'}", "--output", page)
    assert done.returncode == 0, done.stderr
    assert str(page) in done.stdout
    assert "<th>a</th><th>b</th>" in page.read_text()


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    """Status 1 and a sentence, for a directory of something else and for a file; no traceback."""
    (tmp_path / "file").write_text("")
    for found in (tmp_path, tmp_path / "file"):
        done = command(f"a={found}", "--output", tmp_path / "page.html")
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {found}: expected ")
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
