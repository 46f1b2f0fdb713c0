"""The transformer: embedding, a scanned stack of pre-norm blocks, a final norm, the output head.

All blocks are one module whose arrays carry a "layers" axis (`hax.nn.Stacked`), so the program's
size and its compile time do not grow with depth. Gradient checkpointing wraps the block itself in
`jax.checkpoint` instead of using Stacked's own setting, which knows saved names but no "dots"
policy and is frozen into the model; here it is an argument of the call.

Parameters are float32. A forward pass multiplies in the dtype its parameters have (see
`models.precision.cast`); norm statistics, softmax and logits are float32.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.attention import Attention
from models.attention_splash import AttentionSharding
from models.axes import POSITION, ModelAxes, model_axes
from models.config import TransformerConfig
from models.initial import truncated
from models.mlp import Mlp
from models.norms import RmsNorm
from models.remat import Remat, checkpoint_policy
from models.rotary import rotary_angles


class Forward(TypedDict, total=False):
    """How to run a forward pass; nothing here changes its result beyond rounding, except segments.

    Attributes:
        segment_ids: int32 [batch, position]; attention stays inside equal ids. Default: all one.
        remat: what the backward pass keeps, see `models.remat`. Default: "full".
        backend: "reference" or "splash", as `models.attention.choose_backend` returned it.
        sharding: the mesh axes that splash runs over; None on one device.
        interpret: run splash in Pallas' interpreter (tests on the CPU).
    """

    segment_ids: NamedArray | None
    remat: Remat
    backend: str
    sharding: AttentionSharding | None
    interpret: bool


class Block(eqx.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Block:
        """Float32 parameters."""
        attention, mlp = jax.random.split(key, 2)
        return Block(
            attention_norm=RmsNorm.init(axes.Embed, config.norm_epsilon),
            attention=Attention.init(config, axes, key=attention),
            mlp_norm=RmsNorm.init(axes.Embed, config.norm_epsilon),
            mlp=Mlp.init(config, axes, key=mlp),
        )

    def __call__(
        self,
        x: NamedArray,
        angles: NamedArray,
        *,
        segment_ids: NamedArray | None,
        backend: str,
        sharding: AttentionSharding | None,
        interpret: bool,
    ) -> NamedArray:
        """[batch, position, embed] to the same axes and dtype."""
        attention_input = hax.tree_checkpoint_name(self.attention_norm(x), "attention_input")
        x = x + self.attention(
            attention_input,
            angles,
            segment_ids=segment_ids,
            backend=backend,
            sharding=sharding,
            interpret=interpret,
        )
        x = hax.tree_checkpoint_name(hax.auto_sharded(x), "mlp_input")
        return hax.auto_sharded(x + self.mlp(self.mlp_norm(x)))


class Transformer(eqx.Module):
    """A decoder-only language model.

    Attributes:
        embedding: [vocab, embed].
        blocks: all blocks, stacked along "layers".
        final_norm: before the output head.
        head: [vocab, embed], None when the embedding is tied.
        config: the shape.
    """

    embedding: NamedArray
    blocks: hax.nn.Stacked[Block]
    final_norm: RmsNorm
    head: NamedArray | None
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: jax.Array) -> Transformer:
        """Float32 parameters, see `models.initial` for their distribution."""
        axes = model_axes(config)
        embedding, blocks, head = jax.random.split(key, 3)
        table = (axes.Vocab, axes.Embed)
        stack = hax.nn.Stacked.init(axes.Layers, Block)
        return Transformer(
            embedding=truncated(embedding, table, config.embedding_std),
            blocks=stack(config, axes, key=jax.random.split(blocks, config.layers)),
            final_norm=RmsNorm.init(axes.Embed, config.norm_epsilon),
            head=None if config.tied else truncated(head, table, config.embedding_std),
            config=config,
        )

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis."""
        return self.embedding.resolve_axis("vocab")

    @property
    def output_head(self) -> NamedArray:
        """The matrix [vocab, embed] that makes logits: the head, or the tied embedding."""
        return self.embedding if self.head is None else self.head

    def hidden(self, tokens: NamedArray, **forward: Unpack[Forward]) -> NamedArray:
        """Final hidden states [batch, position, embed] of int32 tokens [batch, position].

        They are normalised and in the parameters' dtype; position i sees tokens 0..i of its
        segment. An id outside the vocabulary is a caller's error that is not detected here.

        Raises:
            InputError: the remat setting is unknown, or the back end cannot run these shapes.
        """
        axes = model_axes(self.config)
        Position = tokens.resolve_axis(POSITION)
        angles = rotary_angles(Position, axes.HeadSize, self.config.rope_base)

        def apply(block: Block, x: NamedArray) -> NamedArray:
            return block(
                x,
                angles,
                segment_ids=forward.get("segment_ids"),
                backend=forward.get("backend", "reference"),
                sharding=forward.get("sharding"),
                interpret=forward.get("interpret", False),
            )

        policy = checkpoint_policy(forward.get("remat", "full"))
        if policy is not None:
            # Inside a scan XLA cannot merge the recomputation with the forward pass.
            apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=False)
        x = hax.auto_sharded(self.embedding.take("vocab", tokens))
        return self.final_norm(self.blocks.fold_via(apply)(x))

    def logits(self, tokens: NamedArray, **forward: Unpack[Forward]) -> NamedArray:
        """Float32 logits [batch, position, vocab] of the next token at every position."""
        return self.logits_of(self.hidden(tokens, **forward))

    def logits_of(self, hidden: NamedArray) -> NamedArray:
        """Float32 logits [..., vocab] of hidden states [..., embed], soft cap applied."""
        logits = hax.dot(hidden, self.output_head, axis="embed", preferred_element_type=jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * hax.tanh(logits / cap)
