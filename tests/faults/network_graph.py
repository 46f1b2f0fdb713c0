"""A graph whose only step reads a source over HTTP, for trials without a network."""

from __future__ import annotations

import os

from data import ranges
from pipeline import Result, StepContext, step
from tests.pipeline.toy import Total

EXPERIMENT = """
from dataclasses import dataclass

from pipeline import main
from tests.faults.network_graph import fetched


@dataclass(frozen=True)
class Settings:
    pass


if __name__ == "__main__":
    main(lambda settings: fetched(), {"only": Settings()})
"""


@step(output=Total, version=1)
def fetched(run: StepContext) -> Result:
    """The size of the file at the address in `PONENTE_ADDRESS`."""
    return {"total": ranges.look(os.environ["PONENTE_ADDRESS"]).size}
