"""`muon_groups` with the momentum that rises and falls, as nanochat has it."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(
    optimizer=replace(
        OPTIMIZER,
        muon_momentum_start=0.85,
        muon_momentum_warmup=100,
        muon_momentum=0.97,
        muon_momentum_end=0.9,
    ),
    model=START,
)
