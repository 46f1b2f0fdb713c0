"""`muon_groups` with matrices that write to the residual stream zero at first."""

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=OPTIMIZER, model=START | {"zero_outputs": True})
