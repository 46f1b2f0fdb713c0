"""An experiment of the toy steps, and a file that has it under another preset."""

from __future__ import annotations

from typing import Any

from pipeline import Experiment
from tests.pipeline.toy import Scale, clamp, numbers, refuse, scaled, total

EXPERIMENT = """
from tests.pipeline.cli.toy_experiment import build
from pipeline import Experiment

experiment = Experiment(build, other={"count": 20})
"""


def build(count: int = 10, limit: int = 100, refuses: bool = False) -> Any:
    cut = clamp(numbers(count=count), limit=limit)
    if refuses:
        return refuse(cut)
    return total(cut, scaled(cut, scale=Scale(3)))


TOY = Experiment(build, wide={"count": 20})
