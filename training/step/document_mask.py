"""Document boundaries and the loss mask of a sequence, derived from its stored ids.

The stored ids determine both masks, so a batch holds ids only:

- An EOS begins a segment: it is the first token of the document that follows it, and a prompt
  begins with it too. Attention stays inside a segment, so no prediction sees another document's
  text; the EOS itself is predicted from the document that it ends.
- An EOS after an EOS is padding (see `data.batches.packing`); its prediction does not count.
- Where a cache has a loss mask, an id >= vocab_size stands for the token id - vocab_size: the model
  reads the token, and its prediction does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.axes import BATCH, POSITION
from models.named import NamedArray


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Derives tokens, segments and loss mask from the stored ids of a run.

    `separate` stops attention at the end of a document, `padded` sequences may end in padding, and
    `masked_from` is the vocabulary's size where ids are stored with a loss mask.
    """

    eos_id: int
    separate: bool = False
    padded: bool = False
    masked_from: int | None = None

    def tokens(self, stored: jax.Array) -> jax.Array:
        """Token ids, int32 [batch, position], of stored ids of the same shape and dtype."""
        if self.masked_from is None:
            return stored
        return jnp.where(stored < self.masked_from, stored, stored - self.masked_from)

    def segments(self, tokens: jax.Array) -> NamedArray | None:
        """int32 [batch, position], equal within a document; None if attention crosses documents."""
        if not self.separate:
            return None
        # Position i has the number of EOS ids in 0..i, so an EOS shares the next document's number.
        ends = (tokens == self.eos_id).astype(jnp.int32)
        return hax.named(jnp.cumsum(ends, axis=1), (BATCH, POSITION))

    def counted(self, stored: jax.Array) -> NamedArray | None:
        """Bool [batch, position]: whether the prediction of token i + 1 counts; None if all do."""
        # The last position has no next token; the loss ignores the value that wraps around to it.
        following, counts = jnp.roll(stored, -1, axis=1), []
        if self.masked_from is not None:
            counts.append(following < self.masked_from)
        if self.padded:
            counts.append((stored != self.eos_id) | (following != self.eos_id))
        if not counts:
            return None
        return hax.named(jnp.stack(counts).all(axis=0), (BATCH, POSITION))
