"""`ponente trace`: every step of a training that reads a document, over its whole schedule.

ponente trace doc-1234 runs/train-0123456789
ponente trace data/part-3.jsonl:17 runs/train-0123456789
ponente trace "words of its text" runs/train-0123456789 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from pipeline.cli import options as engine
from pipeline.cli.context import say
from steps.cli.rewind import COLUMNS, RUN, directory_of, where
from steps.rewind.run import open_run


def run(arguments: list[str]) -> int:
    """Print the steps; returns the exit status 0."""
    from steps.rewind.batch import Rewinder
    from steps.rewind.sights import trace

    options = _parser().parse_args(arguments)
    with Rewinder(open_run(directory_of(options.run))) as rewinder:
        for origin, sights in trace(rewinder, options.document):
            if options.json:
                seen = [dataclasses.asdict(each) for each in sights]
                say(json.dumps({"format": 1, "document": dataclasses.asdict(origin), "seen": seen}))
                continue
            say(where(origin))
            for each in sights:
                span = f"tokens {each.first}-{each.first + each.tokens - 1}"
                at = f"step {each.step:,}  row {each.row:,}"
                say(f"  {at}  {span}  {each.part}, epoch {each.epoch}"[:COLUMNS])
            if not sights:
                say("  no step reads it")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = engine.verb_parser("trace", __doc__)
    add = parser.add_argument
    add("document", metavar="DOCUMENT", help="an id, FILE:ROW (from 0), or words of its text")
    add("run", metavar="RUN", help=RUN)
    add("--json", action="store_true", help="print one JSON object for each document")
    return parser
