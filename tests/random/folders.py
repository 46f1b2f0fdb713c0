"""Folders of models, and what `transformers` and the `gguf` package make of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from pipeline.errors import InputError
from steps.exchange.gguf.file import write_gguf

_LARGEST = 4_000_000  # parameters of a model that is built


def refusal(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What an action returned, or the one line with which it was refused."""
    try:
        return action(), None
    except InputError as error:
        line = str(error)
        assert "\n" not in line, f"more than one line: {line[:300]!r}"
        return None, line


def build_theirs(config: dict[str, Any]) -> Any:
    """The model of `transformers` for a config.json, random; None if it refuses it or is large."""
    import transformers

    from tests.models.transformers_weights import randomized

    try:
        kind = type(transformers.AutoConfig.for_model(config["model_type"]))
        read = kind.from_dict(dict(json.loads(json.dumps(config))))
        if _size(read) > _LARGEST:
            return None
        return randomized(transformers.AutoModelForCausalLM.from_config(read), seed=1)
    except Exception:  # noqa: BLE001 - whatever it refuses with
        return None


def _size(config: Any) -> int:
    import torch
    import transformers

    if config.num_hidden_layers > 9:
        return _LARGEST + 1
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in empty.parameters())


def save(
    folder: Path, model: Any, config: dict[str, Any], tokenizer: bytes, shard: str = "1GB"
) -> None:
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)


def load_theirs(folder: Path) -> Any:
    """The model that `transformers` reads; None if it refuses, or makes up a tensor."""
    import torch
    import transformers

    try:
        if _size(transformers.AutoConfig.from_pretrained(folder)) > _LARGEST:
            return None
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except Exception:  # noqa: BLE001 - whatever it refuses with
        return None
    return None if report["missing_keys"] or report["mismatched_keys"] else model.eval()


def gguf(folder: Path, workspace: Path, dtype: str = "f32") -> GGUFReader:
    path = str(workspace / "model.gguf")
    write_gguf(str(folder), path, dtype, "model")
    return GGUFReader(path)


def oracle() -> None:
    """Load `transformers`, without its log; a test without it is skipped."""
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    for name in ("transformers", "gguf", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
