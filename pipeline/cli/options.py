"""Flags: the engine's own by argparse, the experiment's settings by tyro."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pipeline.errors import InputError
from pipeline.graph.node import Node

S = TypeVar("S")
VERBS = {
    "run": "bring every step up to date",
    "plan": "what would run, and why",
    "explain": "why a step is not up to date",
    "status": "how far the steps are, and what the last runs did",
    "graph": "steps, inputs and directories",
    "show": "one output: configuration, result, lineage",
    "logs": "the log of a step's last attempt",
    "verify": "compare outputs with their digests",
    "gc": "list, or delete, what no preset reaches",
    "adopt": "take an output from elsewhere for what a step would build",
    "unlock": "end a lease whose owner hangs",
    "doctor": "check this machine and the store; needs no file",
}
_TAKES_WORDS = {"explain", "status", "show", "logs", "verify", "gc", "adopt", "unlock"}

# While another command gathers graphs, `main` adds its targets here and does nothing else.
collected: list[Node] | None = None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def seconds(text: str) -> float:
    """Seconds of a time such as 90s, 30m, 6h or 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 30m or 6h, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parser(presets: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The engine's flags."""
    made = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        usage=f"%(prog)s [{'|'.join(VERBS)}] [STEP ...] [flags]",
    )
    add = made.add_argument
    add("--preset", choices=list(presets), default=next(iter(presets)))
    add(
        "--prefix",
        default=os.environ.get("PONENTE_PREFIX", "./runs"),
        help="store: a path or gs://bucket/dir",
    )
    add(
        "--shared",
        type=_names,
        default=_names(os.environ.get("PONENTE_SHARED", "")),
        help="stores to read from when an output is not in --prefix; never written",
    )
    add("--only", type=_names, default=(), metavar="STEP,...", help="run nothing but these")
    add("--until", type=_names, default=(), metavar="STEP,...", help="stop after these")
    add("--force", type=_names, default=(), metavar="STEP,...", help="build these again")
    add("--keep-going", action="store_true", help="after a failure, run what does not need it")
    add("--strict", action="store_true", help="refuse outputs built by other code")
    add("--follow", action="store_true", help="logs: print what is written from now on too")
    add(
        "--wait",
        type=seconds,
        metavar="TIME",
        help="how long a step may wait for hardware, such as 90s, 30m or 6h; no limit by default",
    )
    add("--jobs", type=int, default=0, help="steps at once; 0 for what the resources allow")
    add("--executor", choices=("ray", "inline"), default="ray")
    add("--cluster", default=os.environ.get("RAY_ADDRESS"), help="address of a Ray cluster to join")
    add("--delete", action="store_true", help="gc: delete what it lists")
    add("--presets-only", action="store_true", help="gc: list outputs of recorded runs too")
    add("--older-than", type=seconds, default=0.0, metavar="14d", help="gc: keep what is younger")
    add("--keep", type=_names, default=(), metavar="STEP|DIR,...", help="gc: keep these")
    add("--from", dest="source", metavar="DIR", help="adopt: the output to adopt")
    add("--undo", action="store_true", help="adopt: remove an adopted output")
    add("--yes", action="store_true", help="gc, adopt, unlock: do not ask")
    add("--html", metavar="FILE", help="graph: write a page")
    add("--json", action="store_true", help="show: the manifest as it is")
    add("-h", "--help", action="store_true")
    return made


def split(arguments: list[str]) -> tuple[str, list[str], list[str]]:
    """(verb, words, flags): words before the first flag are the verb and what it is about."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    verb = words[0] if words else "run"
    if verb not in VERBS or (len(words) > 1 and verb not in _TAKES_WORDS):
        raise InputError(f"expected one of {', '.join(VERBS)}, got {' '.join(words)!r}")
    return verb, words[1:], arguments[len(words) :]


def override(preset: S, overrides: list[str]) -> S:
    """The preset with fields overridden by dotted flags."""
    if not overrides:
        return preset
    # tyro is slow to import for its size and only flags need it.
    import tyro

    return tyro.cli(
        type(preset), default=preset, args=overrides, config=(tyro.conf.FlagConversionOff,)
    )
