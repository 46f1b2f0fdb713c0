"""Choosing the next token from logits: greedy, or at random among the likeliest.

Logits are divided by the temperature; of the distribution that gives, `top_k` keeps the k likeliest
tokens; of what is left, made to add up to one again, `top_p` keeps the likeliest tokens until their
probabilities reach p (the nucleus of Holtzman et al., 2020, arXiv:1904.09751). Tokens as likely as
the last one kept are kept too, so that the order of the vocabulary decides nothing.

No vocabulary is sorted: the probability from which on tokens are kept is found bit by bit, in 32
passes, which costs the same for every k and p. So both are data, and one program serves them all.

A row's draws depend on the seed, on which row it is and on the position it draws for, and on no
other row.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from models.generate.sampling_config import Sampling

_ALL = 2**31 - 1


class Rules(eqx.Module):
    """`Sampling` as scalars on the device; float32, int32, float32 and a random key."""

    temperature: Array
    top_k: Array
    top_p: Array
    key: Array

    @classmethod
    def of(cls, sampling: Sampling) -> Rules:
        """The same as arrays, for a compiled program."""
        return cls(
            temperature=jnp.float32(sampling.temperature),
            top_k=jnp.int32(_ALL if sampling.top_k is None else min(sampling.top_k, _ALL)),
            top_p=jnp.float32(1.0 if sampling.top_p is None else sampling.top_p),
            key=jax.random.key(sampling.seed),
        )

    def keys(self, rows: int) -> Array:
        """One random key for every row, [rows]."""
        return jax.vmap(lambda row: jax.random.fold_in(self.key, row))(jnp.arange(rows))


def choose(logits: Array, rules: Rules, keys: Array, positions: Array) -> Array:
    """The next token of every row.

    Args:
        logits: float32 [rows, vocab], finite.
        rules: how to choose.
        keys: of the rows, see `Rules.keys`.
        positions: int32 [rows], where the chosen tokens will stand.

    Returns:
        int32 [rows].
    """

    def draw(logits: Array) -> Array:
        likely = nucleus(logits / rules.temperature, rules.top_k, rules.top_p)
        here = jax.vmap(jax.random.fold_in)(keys, positions)
        return jax.vmap(jax.random.categorical)(here, likely).astype(jnp.int32)

    def best(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.lax.cond(rules.temperature > 0, draw, best, logits)


def nucleus(logits: Array, top_k: Array, top_p: Array) -> Array:
    """`logits` [rows, vocab] with minus infinity for what `top_k` and then `top_p` leave out."""

    def by_rank(logits: Array) -> Array:
        return _keep(logits, lambda kept: jnp.sum(kept, axis=-1) >= top_k)

    def by_mass(logits: Array) -> Array:
        probabilities = jax.nn.softmax(logits, axis=-1)
        return _keep(
            logits, lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= top_p
        )

    def same(logits: Array) -> Array:
        return logits

    logits = jax.lax.cond(top_k < logits.shape[-1], by_rank, same, logits)
    return jax.lax.cond(top_p < 1, by_mass, same, logits)


def _keep(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """The fewest of each row's largest logits that are `enough`, the rest minus infinity.

    Args:
        logits: float32 [rows, vocab].
        enough: boolean [rows] of what is kept, boolean [rows, vocab]; more is enough too.
    """
    ranks = _ranks(logits)

    def add_bit(turn: Array, least: Array) -> Array:
        higher = least | (jnp.uint32(1 << 31) >> turn.astype(jnp.uint32))
        return jnp.where(enough(ranks >= higher[:, None]), higher, least)

    least = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(ranks >= least[:, None], logits, -jnp.inf)


def _ranks(x: Array) -> Array:
    """uint32 numbers in the order of the float32 ones; the two zeros differ."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits < sign, bits | sign, ~bits)
