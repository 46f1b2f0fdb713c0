"""What a command says of its machines: whether they are preemptible, and how often."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What a plan assumes of the machines."""

    spot: bool = False  # preemptible
    # Between two preemptions: a mean, or samples; empty for what the step knows of them.
    hours: tuple[float, ...] = ()
    source: str = ""  # of `hours`

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Of a number, the mean, or of a file with a sample in each line; "#" begins a comment."""
        try:
            hours, source = (float(text),), "given by --preemptions"
        except ValueError:
            try:
                with open(text, encoding="utf-8") as file:
                    lines = [line.partition("#")[0].strip() for line in file]
                hours, source = tuple(float(line) for line in lines if line), f"samples of {text}"
            except (OSError, ValueError) as error:
                raise argparse.ArgumentTypeError(
                    "expected hours, or a file with hours between preemptions, one in each line, "
                    f"got {text!r}: {error}"
                ) from None
        if not hours or not all(0 < each < float("inf") for each in hours):
            raise argparse.ArgumentTypeError(f"expected hours above 0, found others in {text!r}")
        return cls(True, hours, source)
