"""Tokens a second of greedy completions: with the cache, without one, and by `transformers`.

    python -m tests.bench.generation --new 128 --batch 1 8

One JSON object a line on stdout. The model is a Qwen3 shape with random weights in float32; where
PyTorch and `transformers` are installed (the `oracle` extra), theirs has the same weights and its
own cache, and `same_tokens` says whether both wrote the same. `uncached` runs the whole window for
every token, compiled. Everything is warmed up first, then runs in turns, `--runs` times;
`tokens_per_second` is of all rows together and the median run, `cpu_ms_per_token` processor time of
the whole process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models.named as hax
from models.generate.generate import generate
from models.shape.config import TransformerConfig
from models.transformer import Forward, Transformer

SHAPES = {
    "1m": TransformerConfig(
        vocab_size=2048, layers=4, embed=128, heads=4, kv_heads=2, head_size=32, mlp=384
    ),
    "29m": TransformerConfig(
        vocab_size=8192, layers=8, embed=512, heads=8, kv_heads=4, head_size=64, mlp=1536
    ),
}
Rows = list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens added to each")
    parser.add_argument("--runs", type=int, default=5)
    flags = parser.parse_args(arguments)
    peer = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if not peer:
        _emit({"name": "transformers", "skipped": "PyTorch or transformers is not installed"})
    for shape in flags.shape:
        config = SHAPES[shape]
        theirs, model = _both(config) if peer else (None, _random(config))
        systems = {
            "ponente": functools.partial(generate, model, new_tokens=flags.new),
            "uncached": functools.partial(_uncached, model, flags.new),
        }
        if theirs is not None:
            systems["transformers"] = functools.partial(_transformers, theirs, flags.new)
        for batch in flags.batch:
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, config.vocab_size, (batch, flags.prompt)).tolist()
            about = {"shape": shape, "batch": batch, "prompt": flags.prompt, "new": flags.new}
            about["parameters"] = config.parameter_count
            _race(systems, prompts, about, flags.runs)
    return 0


def _race(
    systems: dict[str, Callable[[Rows], Rows]], prompts: Rows, about: dict[str, Any], runs: int
) -> None:
    """One after the other, as often as asked for, after a run that compiles."""
    wrote = {name: write(prompts) for name, write in systems.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for _ in range(runs):
        for name, write in systems.items():
            began, worked = time.perf_counter(), time.process_time()
            write(prompts)
            took[name].append((time.perf_counter() - began, time.process_time() - worked))
    tokens = about["batch"] * about["new"]
    for name, found in took.items():
        wall, worked = (statistics.median(times) for times in zip(*found, strict=True))
        line = {
            "name": name,
            **about,
            "tokens_per_second": round(tokens / wall, 1),
            "cpu_ms_per_token": round(worked / tokens * 1000, 3),
            "same_tokens": wrote[name] == wrote["ponente"],
            "load": round(os.getloadavg()[0], 1),
        }
        _emit(line)


@jax.jit
def _whole_window(model: Transformer, rows: jax.Array, start: jax.Array) -> jax.Array:
    """`rows` [batch, position] filled from `start` on, by one forward pass of all for each."""

    def add_one(at: jax.Array, rows: jax.Array) -> jax.Array:
        hidden = model.hidden(hax.named(rows, ("batch", "position")), forward=Forward(remat="none"))
        logits = model.logits_of(hidden["position", at - 1]).rearrange(("batch", "vocab")).array
        return rows.at[:, at].set(jnp.argmax(logits, axis=-1).astype(jnp.int32))

    return jax.lax.fori_loop(start, rows.shape[1], add_one, rows)


def _uncached(model: Transformer, new: int, prompts: Rows) -> Rows:
    length = len(prompts[0])
    rows = np.zeros((len(prompts), length + new), np.int32)
    rows[:, :length] = prompts
    return np.asarray(_whole_window(model, rows, jnp.int32(length)))[:, length:].tolist()


def _transformers(model: Any, new: int, prompts: Rows) -> Rows:
    import torch

    ids = torch.tensor(prompts)
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **how)
    return out[:, ids.shape[1] :].tolist()


def _both(config: TransformerConfig) -> tuple[Any, Transformer]:
    """A Qwen3ForCausalLM of random weights, and the same as ours."""
    from tests.models import transformers_weights as weights

    model = weights.random_model(config, 4096)
    return model, weights.ours(config, weights.numpy_state(model.state_dict()))


def _random(config: TransformerConfig) -> Transformer:
    return jax.jit(lambda key: Transformer.init(config, key=key))(jax.random.key(0))


def _emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
