"""Tokens a second of greedy completions: with the cache, without one, and by `transformers`.

    python -m tests.bench.generation --new 128 --batch 1 8

One JSON object a line on stdout. The model is a Qwen3 shape with random weights in float32; where
PyTorch and `transformers` are installed (the `oracle` extra), theirs has the same weights and its
own cache, and `same_tokens` says whether both wrote the same. `uncached` runs the whole window for
every token, compiled. Everything is warmed up first, then runs in turns, `--runs` times;
`tokens_per_second` is of all rows together and the median run, `best_tokens_per_second` of the
fastest, `cpu_ms_per_token` processor time of the whole process. `first_token_ms` is the wall time
until the first tokens of all rows are there; `cold_s` is the first run, with its compilations.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models.named as hax
from models.generate.generate import stream
from models.generate.kv_cache import cache_bytes
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
Write = Callable[[], list[list[int]]]


@dataclasses.dataclass
class System:
    """A way to continue the prompts, and how long it took.

    Attributes:
        write: all rows, prompt left out.
        first: the same, of one token.
    """

    name: str
    write: Write
    first: Write
    versions: dict[str, str]
    cold: float = 0.0
    walls: list[float] = dataclasses.field(default_factory=list)
    worked: list[float] = dataclasses.field(default_factory=list)
    firsts: list[float] = dataclasses.field(default_factory=list)
    wrote: list[list[int]] = dataclasses.field(default_factory=list)

    def warm_up(self) -> None:
        """Compile, and keep what was written."""
        began = time.perf_counter()
        self.wrote = self.write()
        self.cold = time.perf_counter() - began
        self.first()

    def measure(self) -> None:
        """One run."""
        began, worked = time.perf_counter(), time.process_time()
        self.write()
        self.walls.append(time.perf_counter() - began)
        self.worked.append(time.process_time() - worked)
        began = time.perf_counter()
        self.first()
        self.firsts.append(time.perf_counter() - began)


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
        for batch in flags.batch:
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, config.vocab_size, (batch, flags.prompt)).tolist()
            systems = [_cached(model, prompts, flags.new), _uncached(model, prompts, flags.new)]
            if theirs is not None:
                systems.append(_transformers(theirs, prompts, flags.new))
            _race(systems, config, {"shape": shape, "batch": batch, "prompt": flags.prompt}, flags)
    return 0


def _race(
    systems: list[System], config: TransformerConfig, about: dict[str, Any], flags: Any
) -> None:
    for system in systems:
        system.warm_up()
    for _ in range(flags.runs):
        for system in systems:
            system.measure()
    tokens = about["batch"] * flags.new
    slots = cache_bytes(config, about["batch"], flags.prompt + flags.new, 4)
    for system in systems:
        median = statistics.median(system.walls)
        _emit(
            {
                "name": system.name,
                **about,
                "new": flags.new,
                "parameters": config.parameter_count,
                "tokens_per_second": round(tokens / median, 1),
                "best_tokens_per_second": round(tokens / min(system.walls), 1),
                "ms_per_step": round(median / flags.new * 1000, 3),
                "cpu_ms_per_token": round(statistics.median(system.worked) / tokens * 1000, 3),
                "first_token_ms": round(statistics.median(system.firsts) * 1000, 2),
                "cold_s": round(system.cold, 2),
                "cache_bytes": slots if system.name != "uncached" else 0,
                "same_tokens": system.wrote == systems[0].wrote,
                "load": round(os.getloadavg()[0], 1),
                "versions": system.versions,
            }
        )


def _cached(model: Transformer, prompts: list[list[int]], new: int) -> System:
    def write(count: int = new) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in prompts]
        for parts in stream(model, prompts, new_tokens=count):
            for row, part in zip(rows, parts, strict=True):
                row += part
        return rows

    def first() -> list[list[int]]:
        return next(iter(stream(model, prompts, new_tokens=new)))

    return System("ponente", write, first, _versions("jax", HALIAX))


@jax.jit
def _whole_window(model: Transformer, rows: jax.Array, start: jax.Array) -> jax.Array:
    """`rows` [batch, position] filled from `start` on, by one forward pass of all for each."""

    def add_one(at: jax.Array, rows: jax.Array) -> jax.Array:
        hidden = model.hidden(hax.named(rows, ("batch", "position")), forward=Forward(remat="none"))
        logits = model.logits_of(hidden["position", at - 1]).rearrange(("batch", "vocab")).array
        return rows.at[:, at].set(jnp.argmax(logits, axis=-1).astype(jnp.int32))

    return jax.lax.fori_loop(start, rows.shape[1], add_one, rows)


def _uncached(model: Transformer, prompts: list[list[int]], new: int) -> System:
    length = len(prompts[0])

    def write(count: int = new) -> list[list[int]]:
        rows = np.zeros((len(prompts), length + count), np.int32)
        rows[:, :length] = prompts
        return np.asarray(_whole_window(model, rows, jnp.int32(length)))[:, length:].tolist()

    return System("uncached", write, lambda: write(1), _versions("jax", HALIAX))


def _transformers(model: Any, prompts: list[list[int]], new: int) -> System:
    import torch

    ids = torch.tensor(prompts)

    def write(count: int = new) -> list[list[int]]:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return System("transformers", write, lambda: write(1), _versions("torch", "transformers"))


def _both(config: TransformerConfig) -> tuple[Any, Transformer]:
    """A Qwen3ForCausalLM of random weights, and the same as ours."""
    import transformers

    from tests.models import transformers_weights as weights

    made = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        num_hidden_layers=config.layers,
        hidden_size=config.embed,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.mlp,
        rms_norm_eps=config.norm_epsilon,
        tie_word_embeddings=config.tied,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        attention_bias=False,
        max_position_embeddings=4096,
        pad_token_id=None,
    )
    model = weights.randomized(transformers.Qwen3ForCausalLM(made))
    state = weights.numpy_state(model.state_dict())
    return model, weights.ours(config, state)


def _random(config: TransformerConfig) -> Transformer:
    return jax.jit(lambda key: Transformer.init(config, key=key))(jax.random.key(0))


HALIAX = "haliax" if sys.version_info < (3, 12) else "marin-haliax"  # see pyproject.toml


def _versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def _emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
