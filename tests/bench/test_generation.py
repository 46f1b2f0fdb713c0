"""The generation bench runs, on few tokens, and all systems write the same."""

from __future__ import annotations

import json

import pytest

from tests.bench import generation


@pytest.mark.slow
def test_the_bench_prints_its_lines(capsys):
    """With and without a cache, the same tokens; `transformers` where it is installed."""
    assert generation.main(["--shape=1m", "--batch=2", "--prompt=5", "--new=6", "--runs=1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ran = {line["name"]: line for line in lines if "skipped" not in line}
    assert {"ponente", "uncached"} <= ran.keys()
    for line in ran.values():
        assert line["same_tokens"]
        assert line["tokens_per_second"] > 0
        assert line["parameters"] == 1_049_984
