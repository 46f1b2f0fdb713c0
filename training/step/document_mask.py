"""Where documents end inside a row and which tokens are predicted, read off the stored ids.

A row says by itself what attention and loss must know, so batches carry ids and nothing else:

- An EOS begins a segment: it stands before the document that follows it as that document's first
  token, which is also how a prompt begins. Attention stays inside a segment, so no prediction sees
  another document's text; the EOS itself is predicted from the document it ends.
- An EOS after an EOS is padding (see `data.batches.packing`): predicting it does not count.
- Where a cache has a loss mask, an id of the vocabulary's size and more stands for the id that is
  so much smaller, of a token that is read and whose prediction does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from models.axes import BATCH, POSITION


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """What stored ids mean in a run.

    Attributes:
        eos_id: the id that ends a document.
        separate: whether attention stops at the end of a document.
        padded: whether rows may end in padding.
        masked_from: the vocabulary's size where ids are stored with a loss mask, else None.
    """

    eos_id: int
    separate: bool = False
    padded: bool = False
    masked_from: int | None = None

    def tokens(self, stored: jax.Array) -> jax.Array:
        """The vocabulary's ids: int32 [batch, position], as the ids as they are stored."""
        if self.masked_from is None:
            return stored
        return jnp.where(stored < self.masked_from, stored, stored - self.masked_from)

    def segments(self, tokens: jax.Array) -> NamedArray | None:
        """int32 [batch, position], equal within a document; None when attention crosses them."""
        if not self.separate:
            return None
        ends = (tokens == self.eos_id).astype(jnp.int32)
        return hax.named(jnp.cumsum(ends, axis=1), (BATCH, POSITION))

    def counted(self, stored: jax.Array) -> NamedArray | None:
        """Bool [batch, position]: whether predicting the next token counts; None where all do.

        Args:
            stored: int32 [batch, position].
        """
        following, counts = jnp.roll(stored, -1, axis=1), []
        if self.masked_from is not None:
            counts.append(following < self.masked_from)
        if self.padded:
            counts.append((stored != self.eos_id) | (following != self.eos_id))
        if not counts:
            return None
        return hax.named(jnp.stack(counts).all(axis=0), (BATCH, POSITION))
