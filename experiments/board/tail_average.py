"""`muon_groups`, evaluated at the mean of the parameters of the last 5 % of steps."""

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=OPTIMIZER, model=START, training={"average_last": 0.05})
