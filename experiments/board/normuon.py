"""`muon_groups` with NorMuon: rows of an update get equal sizes (arXiv:2510.05491)."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=replace(OPTIMIZER, muon_row_beta=0.95), model=START, public_steps=3_250)
