"""`ponente dial`: a whole recipe from one number, with its hours, dollars and forecast loss.

ponente dial --depth 12
ponente dial --parameters 130e6 --hardware v6e-4 --json
ponente dial --dollars 50 --hardware 8xh100

It runs, compiles and rents nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import reduce
from typing import Any

from pipeline.cli import options as engine
from pipeline.cli.context import say
from steps.dial import NAMES, DialledRecipe, recipe

_ABOUT = ("layers", "all parameters", "training tokens", "dollars on demand", "nats per token")
_CONFIGS = ("model", "optimizer", "train")


def run(arguments: list[str]) -> int:
    """Print the recipe; returns the exit status 0."""
    options = vars(_parser().parse_args(arguments))
    as_json = options.pop("json")
    found = recipe(**options)
    if as_json:
        configs = {name: dataclasses.asdict(getattr(found, name)) for name in _CONFIGS}
        say(json.dumps({**headline(found), **configs, "sources": dict(found.sources)}, indent=2))
        return 0
    for name, value in list(headline(found).items())[1:]:
        say(f"{name:<17}{_text(value):<25}{found.sources.get(name, '')}")
    for name, source in found.sources.items():
        if "." in name:
            say(f"  {name:<40}{_text(reduce(getattr, name.split('.'), found)):<14}{source}")
    say(f"left out: {found.sources['left out']}")
    return 0


def headline(found: DialledRecipe) -> dict[str, Any]:
    """What describes the recipe in a few numbers, as JSON; `batch` is in tokens."""
    own = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    known = {name: value for name, value in own.items() if name not in (*_CONFIGS, "sources")}
    run = {"tokens": found.tokens, "batch": found.batch_tokens, "flops": found.flops}
    return {"format": 1, **known, "steps": found.train.steps, **run}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if not number else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _parser() -> argparse.ArgumentParser:
    parser = engine.verb_parser("dial", __doc__)
    add = parser.add_argument
    for name, about in zip(NAMES, _ABOUT, strict=True):
        add(f"--{name}", type=int if name == "depth" else float, help=f"one of five: {about}")
    add("--hardware", default="v6e-8", help="chips, such as v6e-4 or 8xh100 (%(default)s)")
    add("--vocab-size", type=int, default=32_768, help="ids of the tokenizer (%(default)s)")
    add("--length", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    return parser
