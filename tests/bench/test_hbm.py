"""The benches that ask the TPU compiler print what they promise."""

import argparse
from typing import Any

import pytest

from tests.bench.hbm import LEVANTER
from tests.bench.tpu_options import parser, setting
from tests.tpu_compiler import needs_libtpu, printed


def test_settings():
    """JSON where it is JSON, and policies with commas stay whole."""
    assert setting("unroll=4") == ("unroll", 4)
    assert setting("separate_documents=true") == ("separate_documents", True)
    assert setting("loss_chunks=auto") == ("loss_chunks", "auto")
    assert setting("remat=save:a,b;offload:c") == ("remat", "save:a,b;offload:c")
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        setting("unroll")
    options = parser("").parse_args(["--remat", "save:gate,up", "--remat", "none"])
    assert options.remat == ["save:gate,up", "none"]
    assert (options.model, options.slice) == ("tomat_200m", "v6e-16")


def lines(bench: str, *arguments: str) -> list[dict[str, Any]]:
    """Of a bench on four chips, run as a user does."""
    return printed("-m", bench, "--slice", "v6e-4", *arguments)


@pytest.mark.slow
@needs_libtpu
def test_layouts():
    """Each layout has its own collectives, and none repeats more than the scores."""
    sizes = ("layers=2", "embed=256", "mlp=512", "heads=4", "kv_heads=2", "vocab_size=1024")
    shape = ["--batch", "4", "--seq", "1024"]
    for size in sizes:
        shape += ["--set-model", size]
    layouts = ("data", "fsdp-sequence2-tensor2")
    chosen = [word for name in layouts for word in ("--layout", name)]
    data, split = lines("tests.bench.layouts", *shape, *chosen)
    assert set(data["collectives"]) == {"all-reduce"}
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= set(split["collectives"])
    assert 1 < split["executed_over_model"] == data["executed_over_model"]


@pytest.mark.slow
@needs_libtpu
def test_a_program_that_does_not_fit():
    """Refused in seconds, in one line."""
    # An untouched 200M model without recomputation is far above the limit in every version of it.
    shape = ("--batch", "512", "--seq", "8192", "--remat", "none")
    (line,) = lines("tests.bench.hbm", *shape)
    assert line["remat"] == "none"
    assert not line["fits"]
    assert line["need_gib"] > 31.25
    assert line["limit_gib"] == pytest.approx(31.25, abs=0.011)
    assert line["peak_gib"] is None
    assert (line["batch"], line["seq"], line["devices"]) == (512, 8192, 4)
    assert set(line["versions"]) == {"jax", "libtpu"}
    # The backward pass computes the scores once more: 7 matmuls of attention for 6.
    assert line["executed_over_model"] == pytest.approx(1.0542, abs=0.0001)


def test_the_peers_figures_are_named_by_presets():
    from models.shape import presets

    assert all(hasattr(presets, model) for model, *_ in LEVANTER)
    assert LEVANTER["tomat_200m", "v6e-16", 128, 8192]["remat_off"]["temporaries_gib"] == 127.13
