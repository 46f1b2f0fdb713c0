"""Where documents end inside a row, read off the tokens themselves on the device.

A row says by its end-of-document tokens (EOS) what attention and loss must know, so batches carry
tokens and nothing else:

- An EOS begins a segment: it stands before the document that follows it as that document's first
  token, which is also how a prompt begins. Attention stays inside a segment, so no prediction sees
  another document's text; the EOS itself is predicted from the document it ends.
- An EOS after an EOS is padding (see `data.batches.packing`): predicting it does not count.
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
    """What end-of-document tokens mean in a run.

    Attributes:
        eos_id: the id that ends a document.
        separate: whether attention stops at the end of a document.
        padded: whether rows may end in padding.
    """

    eos_id: int
    separate: bool = False
    padded: bool = False

    def segments(self, tokens: jax.Array) -> NamedArray | None:
        """int32 [batch, position], equal within a document; None when attention crosses them."""
        if not self.separate:
            return None
        ends = (tokens == self.eos_id).astype(jnp.int32)
        return hax.named(jnp.cumsum(ends, axis=1), (BATCH, POSITION))

    def counted(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """`mask` [batch, position] without the predictions of padding.

        Args:
            tokens: int32 [batch, position].
            mask: float32, 1 where predicting the next token counts.
        """
        if not self.padded:
            return mask
        is_eos = tokens == self.eos_id
        padding_next = is_eos & jnp.roll(is_eos, -1, axis=1)
        return jnp.where(padding_next, 0.0, mask)
