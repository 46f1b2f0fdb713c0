"""The splash kernel's tiles: they fit the row, and their costs count what JAX's masks hold."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.attention.splash import Kernel, block_sizes, build
from models.shape import splash_tiles as tile_choice
from models.shape.splash_tiles import ScoreMatrix


@pytest.mark.slow
@given(
    tiles=st.integers(1, 300),
    head_size=st.sampled_from([64, 128, 192, 256]),
    window=st.none() | st.integers(1, 5000),
    sequence_shards=st.sampled_from([1, 2, 4]),
)
def test_every_row_gets_tiles_that_the_kernel_takes(tiles, head_size, window, sequence_shards):
    """Multiples of 128 that divide what they tile; 128 only where nothing larger does,
    or for a narrow window."""
    queries = 128 * tiles
    keys = queries * sequence_shards
    sizes = block_sizes(keys, head_size, window, sequence_shards)
    assert sizes.has_backward_blocks
    of_queries = (sizes.block_q, sizes.block_q_dkv, sizes.block_q_dq or 128)
    of_keys = (sizes.block_kv, sizes.block_kv_dkv, sizes.block_kv_dq or 128)
    parts = (sizes.block_kv_compute, sizes.block_kv_dkv_compute)
    assert not any(size % 128 for size in (*of_queries, *of_keys, *parts))
    assert not any(queries % size for size in of_queries)
    assert not any(keys % size for size in of_keys)
    assert not any(size % part for size, part in zip(of_keys, parts, strict=False))
    assert max(*of_queries, *of_keys) <= 2304
    larger = [size for size in range(256, 2305, 128) if queries % size == 0]
    if window is None:
        assert (min(sizes.block_q, sizes.block_q_dkv) == 128) == (not larger)


@pytest.mark.parametrize(
    ("position", "window", "forward", "backward", "fused"),
    [
        (128, None, (128, 128), (128, 128), True),
        (2048, None, (1024, 1024), (1024, 1024), True),
        (4608, None, (1536, 1536), (1536, 1536), True),
        (8192, None, (2048, 2048), (2048, 2048), True),
        (16384, None, (2048, 2048), (2048, 2048), True),
        (8192, 512, (512, 512), (512, 512), False),
        (8192, 1024, (1024, 1024), (1024, 1024), False),
    ],
)
def test_the_table(position, window, forward, backward, fused):
    """The choices that matter, as the compiler's schedules rank them."""
    for head_size in (64, 128):
        sizes = block_sizes(position, head_size, window)
        assert (sizes.block_q, sizes.block_kv) == forward
        assert (sizes.block_q_dkv, sizes.block_kv_dkv) == backward
        assert sizes.use_fused_bwd_kernel == fused


@pytest.mark.parametrize(
    ("position", "sequence_shards", "heads", "fused"),
    [
        (8192, 1, 16 * 32, False),  # 0.25 GiB for every 32 heads
        (8192, 1, 8 * 32, True),
        (16_384, 1, 32, True),
        (32_768, 1, 32, False),
        (131_072, 1, 32, False),  # 64 GiB
        (131_072, 16, 8, True),
    ],
)
def test_the_partial_sums_of_a_device_fit(position, sequence_shards, heads, fused):
    """The fused kernel is chosen by its bytes too, which JAX's own shape of them gives."""
    sizes = block_sizes(position, 128, None, sequence_shards, heads)
    assert sizes.use_fused_bwd_kernel == fused
    assert sizes.has_backward_blocks
    one = tile_choice.partial_sums_bytes(position, 128, sequence_shards, sizes.block_kv_dkv)
    blocks = position // sizes.block_kv_dkv
    assert one == math.prod((blocks, position // sequence_shards, 128)) * 2
    assert not fused or heads * one <= tile_choice.MOST_PARTIAL_SUMS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "sequence_shards"), [(None, 1), (None, 4), (1, 1), (100, 4), (1024, 1), (1500, 4)]
)
def test_the_grid_is_that_of_the_masks_of_jax(monkeypatch, window, sequence_shards):
    """Visited tiles and steps, of the device that has the row's last positions."""
    for tile, fused in (((512, 512), True), ((512, 256), False), ((256, 512), False)):
        sizes = dataclasses.replace(
            block_sizes(512, 64),
            block_q=tile[0],
            block_kv=tile[1],
            block_kv_compute=128,
            block_q_dkv=tile[0],
            block_kv_dkv=tile[1],
            block_kv_dkv_compute=128,
            block_q_dq=None if fused else tile[0],
            block_kv_dq=None if fused else tile[1],
            use_fused_bwd_kernel=fused,
        )
        monkeypatch.setattr("models.attention.splash.block_sizes", lambda *_, s=sizes: s)
        kernel = Kernel(2, 4096, 64, window, None, sequence_shards)
        built = build.__wrapped__(kernel)
        row = ScoreMatrix(4096 // sequence_shards, 4096, window)
        masks = {"forward": built.fwd_mask_info, "queries": built.dq_mask_info}
        masks["fused" if fused else "keys_values"] = built.dkv_mask_info
        for name, info in masks.items():
            if info is None:
                continue
            blocks = info.block_mask[0]
            last = blocks[-(blocks.shape[0] // sequence_shards) :]
            grid = row.grid(tile, name)
            assert grid.visited == (last > 0).sum()
            # Shards share one shape, so another shard's may add hidden steps.
            assert grid.steps <= last.size if sequence_shards > 1 else grid.steps == last.size
