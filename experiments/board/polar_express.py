"""`muon_groups` with the iteration of Polar Express (arXiv:2505.16932)."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=replace(OPTIMIZER, muon_iteration="polar_express"), model=START)
