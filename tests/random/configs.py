"""A random config.json is read as `transformers` reads it, or refused by the name of a key.

Logits are equal to 1e-4 of the largest, and a GGUF file has the numbers that both read.
"""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from steps.exchange.hf.read_hf import open_hf
from tests.data.tokenizer.split_tokenizers import tokenizer_json
from tests.faults.registry import Fault, pick, trials
from tests.random.config_changes import KINDS, ROWS, names_a_change, odd, shown, sound
from tests.random.folders import build_theirs, gguf, load_theirs, oracle, refusal, save

_LENGTH = 24


def random_configs(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """config.json at random: the same logits, or refused by the name of a key that was changed."""
    oracle()
    from tests.models import small, transformers_weights

    figures = dict.fromkeys(("equal", "refused", "only_here", "gguf", "gguf_refused"), 0)
    tokenizer = tokenizer_json("gpt2")
    tokens = small.tokens(1, _LENGTH, ROWS)

    def trial(number: int) -> None:
        draw = random.Random(number)
        kind = KINDS[pick(number, len(KINDS))]
        config, change = odd(kind, draw)
        folder = workspace / "model"
        built = build_theirs(config) or build_theirs(sound(kind, random.Random(number)))
        assert built is not None
        save(folder, built, config, tokenizer)
        try:
            what = f"{kind} {shown(change)}"
            ours, line = refusal(lambda: open_hf(str(folder))[0])
            written, gguf_line = refusal(lambda: gguf(folder, workspace))
            if line is not None:
                figures["refused"] += 1
                assert change, f"{what}: a sound config.json was refused: {line}"
                named = names_a_change(line, change) or load_theirs(folder) is None
                assert named, f"{what}: names no change: {line}"
                assert gguf_line is not None, f"{what}: import refuses it, GGUF does not: {line}"
            else:
                theirs = load_theirs(folder)
                if theirs is None:
                    figures["only_here"] += 1
                else:
                    state = {t.name: ours.content.read(t.name) for t in ours.tensors}
                    model = transformers_weights.ours(ours.config, state)
                    got = small.run(lambda m: m.logits(small.named(tokens)).array, model)
                    away = small.relative(got, _logits(theirs, tokens))
                    assert away < 1e-4, f"{what}: logits {away:.2g} away"
                    figures["equal"] += 1
                if written is None:
                    figures["gguf_refused"] += 1
                    assert "llama.cpp" in gguf_line or names_a_change(gguf_line, change), (
                        f"{what}: GGUF: {gguf_line}"
                    )
                else:
                    figures["gguf"] += 1
                    _check_metadata(written, ours, None if theirs is None else theirs.config, what)
        finally:
            shutil.rmtree(folder)

    return {"trials": trials(seed, count, trial), **figures}


def _logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long), return_dict=True).logits.numpy()


def _check_metadata(written: GGUFReader, ours: Any, theirs: Any, what: str) -> None:
    """The numbers of a GGUF file are those of the import, and of `transformers` if it reads it."""
    found = {name: field.contents() for name, field in written.fields.items()}
    arch = found["general.architecture"]
    shape = ours.config
    wanted = {
        "block_count": shape.layers,
        "context_length": ours.positions,
        "embedding_length": shape.embed,
        "feed_forward_length": shape.mlp,
        "attention.head_count": shape.heads,
    }
    if arch != "gpt2":
        wanted |= {
            "vocab_size": shape.padded_vocab_size,
            "attention.head_count_kv": shape.kv_heads,
            "attention.key_length": shape.head_size,
            "attention.layer_norm_rms_epsilon": shape.norm_epsilon,
            "rope.freq_base": shape.rope_base,
        }
    for name, value in wanted.items():
        got = found[f"{arch}.{name}"]
        assert math.isclose(got, value, rel_tol=1e-6), f"{what}: GGUF: {name} {got}, not {value}"
    if theirs is not None:
        hidden = (theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads)
        assert hidden == (shape.layers, shape.embed, shape.heads), what
        assert found[f"{arch}.context_length"] == theirs.max_position_embeddings, what
        rope = getattr(theirs, "rope_parameters", None) or {}
        names = {"rope.freq_base": "rope_theta"}
        if rope.get("rope_type") == "yarn":
            names["rope.scaling.factor"] = "factor"
            names["rope.scaling.original_context_length"] = "original_max_position_embeddings"
        for name, key in names.items() if rope else ():
            got = found[f"{arch}.{name}"]
            assert math.isclose(got, rope[key], rel_tol=1e-6), f"{what}: GGUF: {name} {got}"
    names = {tensor.name for tensor in written.tensors}
    assert ("output.weight" in names) != shape.tied, f"{what}: GGUF: output.weight"


SUITES = (
    Fault("config.json of every architecture, against transformers", 6, 1000, random_configs),
)
