"""Which shapes are said to waste a TPU."""

import dataclasses

from models.shape import presets
from training.config import Parallelism
from training.cost.resolved_run import lint

ONE = Parallelism(sharding="replicated")
WIDE = dataclasses.replace(presets.tomat_1b, heads=8, kv_heads=8, head_size=256)


def found(model, parallel=ONE, platform="tpu", sequence_length=8192):
    return lint(model, parallel, platform=platform, sequence_length=sequence_length)


def test_narrow_heads_are_named_with_what_to_do():
    """16 heads of 64 fill a quarter of the unit; 4 of 256 have as many weights."""
    (sentence,) = found(presets.tomat_200m)
    assert "head size 64 fills 25%" in sentence
    assert "all 12 layers" in sentence
    assert "4 heads of 256" in sentence


def test_sizes_that_do_not_tile_are_named():
    """Each of them, and rows that leave lanes empty."""
    model = dataclasses.replace(WIDE, embed=2000, mlp=5700, vocab_size=14_336)
    sentences = found(model, sequence_length=1000)
    assert [s.split(" is not")[0] for s in sentences[:2]] == ["embed 2000", "mlp 5700"]
    assert "1000 positions" in sentences[2]
    assert len(sentences) == 3


def test_a_vocabulary_that_does_not_tile_can_be_padded():
    """The sentence names the field, and with it there is none."""
    model = dataclasses.replace(WIDE, vocab_size=50_257)
    (sentence,) = found(model)
    assert "vocab 50257" in sentence
    assert "vocab_multiple to 256" in sentence
    assert found(dataclasses.replace(model, vocab_multiple=256)) == []


def test_thin_contractions_are_named():
    """2,048 features over 16 devices leave 128 to sum over, 5,632 over 16 leave 352."""
    (sentence,) = found(WIDE, Parallelism(tensor=16))
    assert sentence.startswith("attention output")
    assert "128 numbers" in sentence


def test_nothing_is_said_elsewhere_or_of_a_good_shape():
    """No sentence on a CPU, none for tiles of 256."""
    assert found(presets.tomat_200m, platform="cpu") == []
    assert found(WIDE) == []
