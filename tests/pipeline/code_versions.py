"""Versions of one Python file, loaded under one name as separate commands would load them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

MAP = '''
from tests.pipeline.toy import Numbers
from pipeline import Result, StepContext, step


def write(directory, item):
    if item in {bad}:
        raise ValueError("bad item")
    return {{"value": item * {factor}}}


@step(output=Numbers, version=1)
def work(run: StepContext, *, count: int = 4) -> Result:
    """Shards with a value each."""
    done = run.map(write, {{str(i): i for i in range(count)}})
    return {{"values": [shard.result["value"] for shard in done.values()]}}
'''


def load(path: Path, text: str) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def mapped(path: Path, factor: int, bad: tuple[int, ...] = (), note: str = "") -> Any:
    """A node of a version of the step whose shards are this factor times their number."""
    return load(path, MAP.format(factor=factor, bad=bad) + note).work()
