"""`muon_groups` without momentum: the worst row of the public track."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(
    optimizer=replace(OPTIMIZER, muon_momentum=0.0, muon_nesterov=False),
    model=START,
    public_steps=8_225,
)
