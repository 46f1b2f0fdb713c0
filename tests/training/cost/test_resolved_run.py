"""Which shapes are said to waste a TPU."""

import dataclasses
import re

import pytest

from models.shape import presets
from training.config import Parallelism
from training.cost.resolved_run import lint

ONE = Parallelism(sharding="replicated")
WIDE = dataclasses.replace(presets.tomat_1b, heads=8, kv_heads=8, head_size=256)


def changed(**changes):
    return dataclasses.replace(WIDE, **changes)


@pytest.mark.parametrize(
    ("model", "setting", "words"),
    [
        # 16 heads of 64 fill a quarter of the unit; 4 of 256 have as many weights.
        (presets.tomat_200m, {}, ["head size 64 fills 25%.*all 12 layers.*4 heads of 256"]),
        (changed(embed=2000, mlp=5700), {}, ["embed 2000 is not", "mlp 5700 is not"]),
        (WIDE, {"sequence_length": 1000}, ["1000 positions"]),
        (changed(vocab_size=50_257), {}, ["vocab 50257.*vocab_multiple to 256"]),
        (changed(vocab_size=50_257, vocab_multiple=256), {}, []),
        # 2,048 features over 16 devices leave 128 to sum over, 5,632 over 16 leave 352.
        (WIDE, {"parallel": Parallelism(tensor=16)}, ["attention output.*128 numbers"]),
        (presets.tomat_200m, {"platform": "cpu"}, []),
        (WIDE, {}, []),
    ],
)
def test_sizes_that_waste_a_tpu_are_named(model, setting, words):
    """A sentence for each, with what to do; none elsewhere or of a good shape."""
    usual = {"parallel": ONE, "platform": "tpu", "sequence_length": 8192, **setting}
    found = lint(model, usual.pop("parallel"), **usual)
    assert len(found) == len(words)
    assert all(re.search(word, sentence) for word, sentence in zip(words, found, strict=True))
