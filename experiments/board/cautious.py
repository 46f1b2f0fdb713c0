"""`muon_groups` whose decay acts only where an update shrinks a weight (arXiv:2510.12402)."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=replace(OPTIMIZER, cautious_decay=True), model=START)
