"""Where a model starts: scales by kind of initialisation, and what each knob of it changes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import small

CUT = 0.9866
"""Standard deviation of a unit normal cut at three."""
WIDE = {"embed": 256, "heads": 8, "kv_heads": 4, "head_size": 32, "mlp": 512}


def spread(array) -> float:
    """Standard deviation over that of the same normal uncut."""
    return float(array.array.std()) / CUT


@pytest.mark.slow
def test_fan_in_scales():
    """Matrices have variance 1/fan_in, residual ones 2 * layers less, the embedding its own."""
    model = small.init(small.config(**WIDE, embedding_std=0.05, tied=False))
    attention, mlp = model.blocks.stacked.attention, model.blocks.stacked.mlp
    for array, std in (
        (attention.query.matrix, 256**-0.5),
        (attention.value.matrix, 256**-0.5),
        (attention.output.matrix, 256**-0.5 / 6**0.5),
        (mlp.up.matrix, 256**-0.5),
        (mlp.down.matrix, 512**-0.5 / 6**0.5),
        (model.embedding, 0.05),
        (model.head, 0.05),
    ):
        assert spread(array) == pytest.approx(std, rel=0.02)


@pytest.mark.slow
def test_init_scale_scales_the_blocks():
    """It multiplies every matrix of the blocks and leaves the embedding."""
    one, two = (small.init(small.config(init_scale=scale)) for scale in (1.0, 2.0))
    for of in (lambda b: b.mlp.gate, lambda b: b.mlp.down, lambda b: b.attention.output):
        wide = of(two.blocks.stacked).matrix.array
        np.testing.assert_allclose(wide, 2 * of(one.blocks.stacked).matrix.array, rtol=1e-6)
    np.testing.assert_array_equal(one.embedding.array, two.embedding.array)


@pytest.mark.slow
def test_zero_outputs_make_every_block_the_identity():
    """What writes to the residual stream starts at zero, so hidden states are normed embeddings."""
    model = small.init(small.config(zero_outputs=True, biases=True))
    rows = small.named(small.tokens())
    hidden = small.run(lambda m: m.hidden(rows), model)
    embedded = model.final_norm(model.embedding.take("vocab", rows))
    np.testing.assert_allclose(hidden.array, embedded.rearrange(hidden.axes).array, atol=1e-6)
    assert np.asarray(model.blocks.stacked.mlp.up.matrix.array).any()


@pytest.mark.slow
def test_biases_and_norms_start_neutral():
    """Biases are zero and norm weights one."""
    model = small.init(small.config(biases=True, norm="layer"))
    block = model.blocks.stacked
    for linear in (block.attention.query, block.attention.output, block.mlp.up, block.mlp.down):
        assert not np.asarray(linear.bias.array).any()
    for norm in (block.attention_norm, block.attention.query_norm, model.final_norm):
        np.testing.assert_array_equal(norm.weight.array, 1.0)
        np.testing.assert_array_equal(norm.bias.array, 0.0)


@pytest.mark.slow
def test_no_number_is_beyond_three_deviations():
    """The normal distribution is cut."""
    model = small.init(small.config(embedding_std=0.02, vocab_size=4096))
    assert 0.055 < float(abs(model.embedding.array).max()) <= 0.06 + 1e-7
