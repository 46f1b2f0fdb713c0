"""The bench of splash's tiles prints what it promises."""

import pytest

from tests.tpu_compiler import needs_libtpu, printed


@pytest.mark.slow
@needs_libtpu
def test_a_kernel_and_its_rows():
    """One line for the kernel, one for each row length that its tiles divide."""
    kernel, *rows = printed(
        *("-m", "tests.bench.splash_blocks", "--head-size", "64", "--kernel", "forward"),
        *("--tile", "512x512x512", "--position", "2048", "2176", "4608"),
    )
    assert kernel["measured"] == "kernel"
    assert kernel["compiles"]
    assert 0 < kernel["bundles"] < 10_000
    assert [row["position"] for row in rows] == [2048, 4608]
    assert [row["visited"] for row in rows] == [4 * 5 // 2, 9 * 10 // 2]
    assert all(row["cycles"] > row["visited"] * kernel["bundles"] for row in rows)
