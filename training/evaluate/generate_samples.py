"""Generates samples from fixed prompts with the model in training.

One program serves the whole run: prompts, lengths and settings are its constants, and the current
parameters, sharded as in the train step, its only argument. Every process calls it at the same step
and gets the same text.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from data.tokenizer.text_tokenizer import TextTokenizer
from models.generate.generate import NO_TOKEN, advance, begin, cache_length, check, pad_prompts
from models.generate.token_sampling import Rules
from models.jax_numerics import exact_products
from models.layers.norms import cast
from models.layers.scan_layers import split_layers
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from training.config.job import Prompts
from training.sharding.layout import Layout

_REFERENCE_MAX_PROMPT = 512


class SampleGenerator:
    """Completes text prompts with the parameters that each call passes; compiles one program."""

    def __init__(
        self, prompts: Prompts, config: TransformerConfig, layout: Layout, compute_dtype: str
    ) -> None:
        self._prompts = prompts.prompts
        self._tokenizer = TextTokenizer.load(prompts.tokenizer)
        self._encoded = [self._tokenizer.prompt_ids(text) for text in prompts.prompts]
        check(config, self._encoded, prompts.new_tokens)
        tokens, lengths = pad_prompts(config, self._encoded)
        positions = cache_length(config, self._encoded, prompts.new_tokens)
        # Both back ends are plain JAX, which the compiler can partition over any mesh.
        backend = "reference" if tokens.shape[1] <= _REFERENCE_MAX_PROMPT else "blockwise"
        new_tokens, eos_id = prompts.new_tokens, self._tokenizer.eos_id

        @exact_products(compute_dtype)
        def sample(model: Transformer) -> jax.Array:
            compute_params = cast(model, jnp.dtype(compute_dtype))
            rules, end = Rules.of(prompts.sampling), jnp.int32(eos_id)
            state = begin(
                compute_params,
                jnp.asarray(tokens),
                jnp.asarray(lengths),
                jnp.int32(new_tokens),
                rules,
                end,
                positions=positions,
                backend=backend,
            )
            stacked = compute_params.blocks.stacked
            blocks = split_layers(stacked) if layout.platform == "cpu" else None
            first, turns = state.token, jnp.int32(new_tokens - 1)
            rest, _ = advance(
                compute_params, blocks, state, rules, end, turns, most=max(1, new_tokens - 1)
            )
            return jnp.concatenate([first[:, None], rest], axis=1)

        self._sample = jax.jit(sample, out_shardings=layout.replicated)

    def __call__(self, model: Transformer) -> list[dict[str, str]]:
        """One {"prompt", "completion"} per prompt; the model is float32, sharded as ever."""
        rows = np.asarray(jax.device_get(self._sample(model))).tolist()
        written = zip(self._prompts, self._encoded, rows, strict=True)
        return [
            {
                "prompt": prompt,
                "completion": self._tokenizer.continuation(
                    [token for token in row if token != NO_TOKEN], after
                ),
            }
            for prompt, after, row in written
        ]
