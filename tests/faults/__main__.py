"""Run the fault suites, and replay one trial by its number.

    python -m tests.faults                      what runs on every commit
    python -m tests.faults --tier 2             what runs before a release
    python -m tests.faults --only 2 --seed 17   fault 2, beginning with trial 17

Prints the seed first, then one JSON line per suite; exits 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 - the suites run in the environment of the tests: CPU, eight devices
from tests.faults.registry import carry_out, gather


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)  # noqa: T201 - the command's own output


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tier", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", help="numbers of faults, such as 1,2,16")
    parser.add_argument("--seed", type=int, help="number of the first trial; random by default")
    parser.add_argument("--count", type=int, help="trials per suite, instead of the tier's")
    options = parser.parse_args()
    # What the engine warns of is what is being done to it.
    logging.getLogger("ponente").setLevel(logging.CRITICAL)
    faults = gather()
    wanted = [int(n) for n in options.only.split(",")] if options.only else list(faults)
    if unknown := sorted(set(wanted) - set(faults)):
        parser.error(f"no fault {unknown}; there are {list(faults)}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    _say({"seed": seed, "tier": options.tier, "faults": wanted})
    passed = True
    for number in wanted:
        for fault in faults[number]:
            usual = fault.ci if options.tier == 1 else fault.full
            if not usual:
                continue
            count = options.count or usual
            with tempfile.TemporaryDirectory(prefix="ponente-fault-") as workspace:
                row = carry_out(number, fault, seed, count, Path(workspace))
            _say(row)
            passed = passed and row["passed"]
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
