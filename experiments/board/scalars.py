"""`zero_outputs` with learnt scalars on the residual stream and the input of each block."""

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(
    optimizer=OPTIMIZER,
    model=START
    | {"zero_outputs": True, "residual_scale": (1.15, 1.05), "input_scale": (0.2, 0.05)},
)
