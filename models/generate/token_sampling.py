"""Token sampling: the next token from logits, greedy or random among the likeliest.

Logits are divided by the temperature. `top_k` keeps the k likeliest tokens of that distribution.
Their probabilities are renormalized, and `top_p` keeps the likeliest tokens until their
probabilities reach p (nucleus sampling, Holtzman et al., 2020, arXiv:1904.09751). Ties with the
last kept token are kept too, so that the order of the vocabulary does not matter.

The vocabulary is not sorted: a binary search finds the smallest kept logit bit by bit in 32 passes,
at the same cost for every k and p. Both are therefore traced arguments of one program.

A row's samples depend on the seed, the row's index and the position, and not on other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.generate.sampling_config import Sampling
from models.jax_numerics import random_key

_ALL = 2**31 - 1
_SMALLEST = float(np.finfo(np.float32).tiny)


class Rules(eqx.Module):
    """`Sampling` as arrays: float32, int32 and float32 scalars and a random key."""

    temperature: Array
    top_k: Array
    top_p: Array
    key: Array

    @classmethod
    def of(cls, sampling: Sampling) -> Rules:
        """The settings as arguments of a compiled program.

        A device may take numbers below float32's smallest normal one for 0: such a temperature is
        greedy, such a `top_p` keeps the likeliest token.
        """
        cold = sampling.temperature < _SMALLEST
        return cls(
            temperature=jnp.float32(0.0 if cold else sampling.temperature),
            top_k=jnp.int32(_ALL if sampling.top_k is None else min(sampling.top_k, _ALL)),
            top_p=jnp.float32(1.0 if sampling.top_p is None else max(sampling.top_p, _SMALLEST)),
            key=random_key(sampling.seed),
        )

    def keys(self, rows: int) -> Array:
        """One random key for every row, [rows]."""
        return jax.vmap(lambda row: jax.random.fold_in(self.key, row))(jnp.arange(rows))


def choose(logits: Array, rules: Rules, keys: Array, positions: Array) -> Array:
    """The next token of every row, int32 [rows], from finite float32 logits [rows, vocab].

    `keys` are those of `Rules.keys`, `positions` those of the chosen tokens.
    """

    def sample(logits: Array) -> Array:
        # The largest logit becomes 0 first, so that no quotient of a small temperature overflows.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        likely = nucleus(logits / rules.temperature, rules.top_k, rules.top_p)
        position_keys = jax.vmap(jax.random.fold_in)(keys, positions)
        return jax.vmap(jax.random.categorical)(position_keys, likely).astype(jnp.int32)

    def greedy(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(rules.temperature > 0, sample, greedy, logits)


def nucleus(logits: Array, top_k: Array, top_p: Array) -> Array:
    """`logits` [rows, vocab], minus infinity where `top_k` and then `top_p` exclude a token."""

    def by_rank(logits: Array) -> Array:
        return _keep(logits, lambda kept: jnp.sum(kept, axis=-1) >= top_k)

    def by_mass(logits: Array) -> Array:
        probabilities = jax.nn.softmax(logits, axis=-1)
        return _keep(
            logits, lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= top_p
        )

    logits = jax.lax.cond(top_k < logits.shape[-1], by_rank, lambda same: same, logits)
    return jax.lax.cond(top_p < 1, by_mass, lambda same: same, logits)


def _keep(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """The smallest set of each row's largest logits that is `enough`, the rest minus infinity.

    `enough` maps kept tokens, boolean [rows, vocab], to boolean [rows]; with more it stays true.
    """
    ranks = _ranks(logits)

    # Binary search for the largest threshold that keeps enough, from the highest bit down.
    def add_bit(i: Array, least: Array) -> Array:
        higher = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(ranks >= higher[:, None]), higher, least)

    least = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(ranks >= least[:, None], logits, -jnp.inf)


def _ranks(x: Array) -> Array:
    """Map float32 to uint32 in the same order; -0.0 and 0.0 have one rank.

    Positive floats' bits are ordered, and come above the negative ones, whose bits are inverted.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits == sign, 0, bits)  # -0.0
    return jnp.where(bits < sign, bits | sign, ~bits)
