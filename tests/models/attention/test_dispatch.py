"""The reference against NumPy, every back end that runs here against it, and the choice."""

from __future__ import annotations

import functools

import equinox as eqx
import numpy as np
import pytest

from models.attention.backend_choice import choose_backend
from pipeline.errors import InputError
from tests.models import reference
from tests.models.attention.attention_inputs import attended, inputs, segments

reference_of = eqx.filter_jit(functools.partial(attended, backend="reference"))


def oracle(q, k, v, ids, soft_cap, window=None):
    """Position by position in float64: a window is one segment for each position."""
    q, k, v = (np.asarray(x.array, np.float64) for x in (q, k, v))
    # `attention_head` divides by this root; these queries are already scaled.
    q = q * np.sqrt(q.shape[-1])
    out = np.zeros_like(q)
    for b, i, g, r in np.ndindex(q.shape[:-1]):
        seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
        rows = np.repeat(q[b, i, g, r][None], len(range(*seen.indices(i + 1))), 0)
        row = reference.attention_head(rows, k[b, seen, g], v[b, seen, g], ids[b, seen], soft_cap)
        out[b, i, g, r] = row[-1]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "segmented", "soft_cap", "window"),
    [
        ((1, 1), False, None, None),
        ((2, 3), False, None, None),
        ((3, 1), True, None, None),
        ((1, 4), False, 0.7, None),
        ((2, 3), False, None, 1),
        ((1, 1), False, None, 4),
        ((2, 3), True, 0.7, 4),
        ((1, 1), True, 0.7, 30),
    ],
)
def test_reference_equals_numpy(groups, segmented, soft_cap, window):
    """The plain back end computes what a loop over heads and positions computes."""
    q, k, v, _ = inputs(2, 9, *groups, 6)
    ids = segments(2, 9) if segmented else None
    got = reference_of(q, k, v, soft_cap=soft_cap, segment_ids=ids, window=window)
    plain_ids = np.zeros((2, 9)) if ids is None else np.asarray(ids.array)
    got = got.rearrange(q.axes)
    assert got.dtype == q.dtype
    np.testing.assert_allclose(got.array, oracle(q, k, v, plain_ids, soft_cap, window), atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_axis_order_does_not_matter(backend):
    """Inputs in another axis order give the same result."""
    q, k, v, _ = inputs(2, 9, 2, 3, 6)
    ids = segments(2, 9)
    want = reference_of(q, k, v, segment_ids=ids)
    turned = q.rearrange(("head_size", "q_per_kv", "batch", "kv_heads", "position"))
    moved = k.rearrange(("head_size", "kv_heads", "position", "batch"))
    run = eqx.filter_jit(functools.partial(attended, backend=backend))
    got = run(turned, moved, v, segment_ids=ids.rearrange(("position", "batch")))
    np.testing.assert_allclose(got.rearrange(want.axes).array, want.array, atol=1e-6)


CHOICES = [
    ({}, "ponente", "never run on a chip; scores less a running maximum"),
    ({"normalized": True}, "ponente", "scores unshifted up to 60 (QK-norm)"),
    ({"soft_cap": 30.0}, "ponente", "scores unshifted up to 60 (soft cap)"),
    ({"soft_cap": 90.0}, "ponente", "scores less a running maximum"),
    ({"position": 8192}, "ponente", "of splash's scheduled cycles"),
    ({"position": 128}, "splash", "times its scheduled cycles"),
    ({"position": 2**17}, "splash", "not ponente: vector memory cannot hold 131072 keys of 128"),
    ({"position": 2**15, "dtype": "float32"}, "splash", "vector memory cannot hold"),
    ({"requested": "ponente", "normalized": True}, "ponente", "requested, never run on a chip"),
    ({"requested": "splash", "position": 128}, "splash", "requested"),
    ({"position": 500}, "blockwise", "500 positions are not a multiple of 128"),
    ({"position": 128 * 2027}, "splash", "only 128 divides"),
    ({"chip": "v5p"}, "splash", "not ponente: it is made for v6e and this is v5p"),
    ({"chip": ""}, "splash", "made for v6e and this is not known"),
    ({"head_size": 32}, "blockwise", "not ponente: a head size of 32 is not a multiple of 64"),
    ({"sequence_shards": 16}, "blockwise", "64 positions on each of 16 devices"),
    ({"soft_cap": 3.0, "segments": True, "window": 100}, "ponente", "auto"),
    ({"platform": "gpu"}, "cudnn", "auto, 1024 positions on gpu"),
    ({"platform": "gpu", "window": 100}, "cudnn", "auto"),
    ({"platform": "gpu", "soft_cap": 3.0}, "blockwise", "not cudnn: its kernels have no soft cap"),
    ({"platform": "gpu", "segments": True}, "triton", "not cudnn: JAX reads wrong keys"),
    ({"platform": "gpu", "segments": True, "window": 9}, "blockwise", "no soft cap and no window"),
    ({"platform": "gpu", "segments": True, "position": 96}, "blockwise", "not a multiple of 128"),
    ({"platform": "gpu", "segments": True, "head_size": 96}, "blockwise", "not 64 or 128"),
    ({"platform": "gpu", "dtype": "float32"}, "blockwise", "not float32"),
    ({"platform": "gpu", "head_size": 320}, "blockwise", "320 is not a multiple of 8 up to 256"),
    ({"platform": "gpu", "sequence_shards": 2}, "blockwise", "2 devices share one"),
    ({"platform": "cpu", "position": 128}, "reference", "128 positions on cpu"),
    ({"platform": "cpu", "position": 256}, "blockwise", "256 positions on cpu"),
    ({"platform": "cpu", "window": 100}, "blockwise", "on cpu that attend to up to 100"),
    ({"platform": "cpu", "position": 4096}, "blockwise", "4096 positions on cpu"),
    ({"requested": "reference"}, "reference", "requested"),
    ({"requested": "blockwise"}, "blockwise", "requested"),
]
BASE = {"requested": "auto", "platform": "tpu", "position": 1024, "head_size": 128}
BASE |= {"chip": "v6e"}


@pytest.mark.parametrize(("changes", "name", "why"), CHOICES, ids=str)
def test_the_choice_and_its_reason(changes, name, why):
    """Auto takes the platform's kernel where it can run, and every choice says why."""
    chosen, reason = choose_backend(**(BASE | changes))
    assert chosen == name
    assert reason.startswith(f"{name} attention: ")
    assert why in reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"requested": "splash", "platform": "cpu"}, "needs platform tpu and this is cpu"),
        ({"requested": "splash", "position": 500}, "500 positions"),
        ({"requested": "splash", "head_size": 32}, "head size of 32"),
        ({"requested": "ponente", "head_size": 96}, "head size of 96"),
        ({"requested": "ponente", "chip": "v4"}, "made for v6e"),
        ({"requested": "ponente", "dtype": "float16"}, "not float16"),
        ({"requested": "ponente", "position": 2**18}, "vector memory"),
        ({"requested": "cudnn"}, "needs platform gpu and this is tpu"),
        ({"requested": "triton", "platform": "cpu"}, "needs platform gpu and this is cpu"),
        ({"requested": "triton", "platform": "gpu"}, "for documents that share a sequence"),
        ({"requested": "cudnn", "platform": "gpu", "soft_cap": 1.0}, "soft cap"),
        ({"requested": "flash"}, "found 'flash'"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(changes, why):
    """Asking for what cannot run is an error, never a quiet fallback."""
    with pytest.raises(InputError, match=why):
        choose_backend(**(BASE | changes))


@pytest.mark.parametrize(
    ("options", "position", "why"),
    [
        ({"backend": "auto"}, 128, "choose_backend"),
        ({"backend": "splash"}, 100, "128"),
        ({"backend": "cudnn"}, 128, "not float32"),
        ({"backend": "reference", "window": 0}, 128, "at least 1"),
    ],
    ids=str,
)
def test_attend_refuses_what_it_cannot_run(options, position, why):
    """The call itself has no fallback either."""
    q, k, v, _ = inputs(1, position, 1, 1, 64)
    with pytest.raises(InputError, match=why):
        attended(q, k, v, **options)
