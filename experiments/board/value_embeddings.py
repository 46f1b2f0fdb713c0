"""`zero_outputs` with tables added to the values of alternate layers."""

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(
    optimizer=OPTIMIZER, model=START | {"zero_outputs": True, "value_embeddings": "alternate"}
)
