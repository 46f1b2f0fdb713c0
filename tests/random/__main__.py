"""Run the random suites, and replay one trial by its number.

python -m tests.random                            all of them, at their full size
python -m tests.random --only configs --seed 17   one of them, beginning with trial 17
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401 - the environment of the tests: CPU, eight devices
from tests.faults.registry import carry_out
from tests.random import NAMES


def main() -> None:
    """The command line; prints one JSON line per suite, and exits with 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.random", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, help="trials per suite, instead of its own number")
    options = parser.parse_args()
    passed = True
    for name in [options.only] if options.only else NAMES:
        for suite in importlib.import_module(f"tests.random.{name}").SUITES:
            with tempfile.TemporaryDirectory(prefix="ponente-random-") as workspace:
                count = options.count or suite.full
                row = carry_out(name, suite, options.seed, count, Path(workspace))
            print(json.dumps(row), flush=True)  # noqa: T201 - the command's own output
            passed = passed and row["passed"]
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
