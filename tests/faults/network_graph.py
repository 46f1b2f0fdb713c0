"""A graph whose only step reads a source over HTTP, for trials without a network."""

from __future__ import annotations

import os

from data.read import byte_ranges
from pipeline import Result, StepContext, step
from tests.pipeline.toy import Total

EXPERIMENT = """
from pipeline import Experiment
from tests.faults.network_graph import graph

experiment = Experiment(graph)
if __name__ == "__main__":
    experiment.main()
"""


@step(output=Total, version=1)
def fetched(run: StepContext) -> Result:
    """The size of the file at the address in `PONENTE_ADDRESS`."""
    return {"total": byte_ranges.file_state(os.environ["PONENTE_ADDRESS"]).size}


def graph() -> Total:
    """That step alone."""
    return fetched()
