"""`muon_groups` whose rate falls as 1 - sqrt(p) (arXiv:2405.18392)."""

from dataclasses import replace

from experiments.board import Entry
from experiments.board.muon_groups import OPTIMIZER, START

ENTRY = Entry(optimizer=replace(OPTIMIZER, decay_shape="sqrt"), model=START)
