"""The transformer: embedding, a scanned stack of pre-norm blocks, a final norm, the output head.

All blocks are one module whose arrays carry a "layers" axis (`hax.nn.Stacked`). Gradient
checkpointing wraps the block itself in `jax.checkpoint` instead of using Stacked's own setting,
which is frozen into the model; here it is an argument of the call.

Parameters are float32. A forward pass multiplies in the dtype its parameters have (see
`models.precision.cast`); norm statistics, softmax and logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.axes import (
    BATCH,
    EMBED,
    FEATURES_FIRST,
    POSITION,
    TOKENS_FIRST,
    VOCAB,
    ModelAxes,
    model_axes,
)
from models.config import TransformerConfig
from models.embedding import look_up
from models.initialization import truncated
from models.mesh_axes import MeshAxes
from models.mlp import Mlp
from models.norms import Norm
from models.remat import checkpoint_policy
from models.remat_names import BLOCK_INPUT
from models.rotary import rotary_angles
from models.scan_layers import apply_layers, cycles_of
from models.self_attention import Attention
from pipeline.errors import InputError

Attend = Callable[[NamedArray, NamedArray, NamedArray], NamedArray]
"""Attention of scaled queries to keys and values; the result has the queries' axes."""


class Forward(TypedDict, total=False):
    """How to run a forward pass; nothing here changes its result beyond rounding, except segments.

    Attributes:
        segment_ids: int32 [batch, position]; attention stays inside equal ids. Default: all one.
        remat: what the backward pass keeps, see `models.remat_names`. Default: "full".
        backend: as `models.attention.dispatch.choose_backend` returned it. Default: "reference".
        mesh_axes: for the code written per device; None on one device.
        interpret: run splash in Pallas' interpreter (tests on the CPU).
        features_first: order of the activations' axes, see `models.linear`. Default: False.
        unroll: layers in one turn of the compiled loop. Default: 1.
        gather: brings one layer's parameters to where they are multiplied. Default: nothing.
    """

    segment_ids: NamedArray | None
    remat: str
    backend: str
    mesh_axes: MeshAxes | None
    interpret: bool
    features_first: bool
    unroll: int
    gather: Callable[[Any], Any]


class Block(eqx.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Block:
        """Float32 parameters."""
        attention, mlp = jax.random.split(key, 2)
        return Block(
            attention_norm=Norm.init(axes.Embed, config),
            attention=Attention.init(config, axes, key=attention),
            mlp_norm=Norm.init(axes.Embed, config),
            mlp=Mlp.init(config, axes, key=mlp),
        )

    def __call__(
        self,
        x: NamedArray,
        angles: NamedArray | None,
        *,
        window: int | None,
        segment_ids: NamedArray | None,
        backend: str,
        mesh_axes: MeshAxes | None,
        interpret: bool,
    ) -> NamedArray:
        """The residual stream's axes in either order to the same axes and dtype."""
        x = hax.tree_checkpoint_name(x, BLOCK_INPUT)
        attention_input = hax.tree_checkpoint_name(self.attention_norm(x), "attention_input")
        x = x + self.attention(
            attention_input,
            angles,
            window=window,
            segment_ids=segment_ids,
            backend=backend,
            mesh_axes=mesh_axes,
            interpret=interpret,
        )
        return self._feed_forward(x)

    def with_heads(
        self, x: NamedArray, angles: NamedArray | None, attend: Attend
    ) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
        """The same with `attend` for attention; also its keys and values, for later positions."""
        attention_input = self.attention_norm(x)
        q, k, v = self.attention.heads(attention_input, angles)
        x = x + self.attention.merge(attend(q, k, v), attention_input)
        return self._feed_forward(x), (k, v)

    def _feed_forward(self, x: NamedArray) -> NamedArray:
        x = hax.tree_checkpoint_name(hax.auto_sharded(x), "mlp_input")
        return hax.auto_sharded(x + self.mlp(self.mlp_norm(x)))


class Transformer(eqx.Module):
    """A decoder-only language model.

    Attributes:
        embedding: [vocab, embed].
        position_embedding: [position, embed], None with rotary positions.
        blocks: all blocks, stacked along "layers".
        final_norm: before the output head.
        head: [vocab, embed], None when the embedding is tied.
        config: the shape.
    """

    embedding: NamedArray
    position_embedding: NamedArray | None
    blocks: hax.nn.Stacked[Block]
    final_norm: Norm
    head: NamedArray | None
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: jax.Array) -> Transformer:
        """Float32 parameters, see `models.initialization` for their distribution."""
        axes = model_axes(config)
        embedding, blocks, of_head = jax.random.split(key, 3)
        table = (axes.Vocab, axes.Embed)
        stack = hax.nn.Stacked.init(axes.Layers, Block)
        learned = None
        if config.context is not None:
            rows = (Axis(POSITION, config.context), axes.Embed)
            learned = truncated(jax.random.fold_in(embedding, 1), rows, config.embedding_std)
        return Transformer(
            embedding=truncated(embedding, table, config.embedding_std),
            position_embedding=learned,
            blocks=stack(config, axes, key=jax.random.split(blocks, config.layers)),
            final_norm=Norm.init(axes.Embed, config),
            head=None if config.tied else truncated(of_head, table, config.embedding_std),
            config=config,
        )

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis of the tables, its padding among them."""
        return self.embedding.resolve_axis(VOCAB)

    @property
    def output_head(self) -> NamedArray:
        """The matrix [vocab, embed] that makes logits: the head, or the tied embedding."""
        return self.embedding if self.head is None else self.head

    def hidden(self, tokens: NamedArray, **forward: Unpack[Forward]) -> NamedArray:
        """Final hidden states (embed, batch, position in some order) of int32 [batch, position].

        They are normalised and in the parameters' dtype; position i sees tokens 0..i of its
        segment. An id outside the vocabulary is a caller's error that is not detected here.

        Raises:
            InputError: the remat setting is unknown, the back end cannot run these shapes, or rows
                are longer than the learned positions.
        """
        order = FEATURES_FIRST if forward.get("features_first") else TOKENS_FIRST
        x, angles = self.embed(tokens, order, forward.get("mesh_axes"))
        gather = forward.get("gather", lambda block: block)

        def apply(block: Block, x: NamedArray, window: int | None) -> NamedArray:
            return gather(block)(
                x,
                angles,
                window=window,
                segment_ids=forward.get("segment_ids"),
                backend=forward.get("backend", "reference"),
                mesh_axes=forward.get("mesh_axes"),
                interpret=forward.get("interpret", False),
            )

        policy = checkpoint_policy(forward.get("remat", "full"))
        windows = self.config.windows
        unroll = forward.get("unroll", 1)
        if policy is not None:
            # Inside a scan XLA cannot merge the recomputation with the forward pass. Where its body
            # has several blocks XLA would recompute all of them before the last one needs it.
            several = unroll > 1 or cycles_of(windows) != (1, len(windows))
            apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=several)
        x = apply_layers(self.blocks.stacked, x, apply, windows, unroll=unroll)
        return self.final_norm(x)

    def embed(
        self, tokens: NamedArray, order: tuple[str, ...], mesh_axes: MeshAxes | None = None
    ) -> tuple[NamedArray, NamedArray | None]:
        """The first residual stream, with its axes in `order`, and rotary angles if any.

        Raises:
            InputError: rows are longer than the learned positions.
        """
        Position = tokens.resolve_axis(POSITION)
        tokens = tokens.rearrange((BATCH, POSITION))
        table = self.embedding.rearrange((VOCAB, EMBED))
        rows = look_up(table.array, tokens.array, mesh_axes)
        x = hax.named(rows, (*tokens.axes, table.resolve_axis(EMBED)))
        x = self.normalised(x)
        if self.position_embedding is None:
            config, axes = self.config, model_axes(self.config)
            angles = rotary_angles(Position, axes.HeadSize, config.rope_base, config.rope_scaling)
            return hax.auto_sharded(x.rearrange(order)), angles
        context = self.position_embedding.resolve_axis(POSITION).size
        if Position.size > context:
            raise InputError(
                f"tokens: expected rows of at most {context} positions, the length of the learned "
                f"positions, found {Position.size}; shorten the rows or raise the config's context"
            )
        x = x + self.position_embedding[POSITION, : Position.size]
        return hax.auto_sharded(x.rearrange(order)), None

    def normalised(self, embedded: NamedArray) -> NamedArray:
        """Embedded tokens as the first block gets them, see `TransformerConfig.embedding_norm`."""
        if not self.config.embedding_norm:
            return embedded
        return Norm(None, None, EMBED, False, self.config.norm_epsilon)(embedded)

    def logits(self, tokens: NamedArray, **forward: Unpack[Forward]) -> NamedArray:
        """Float32 logits [batch, position, vocab] of the next token, without the padding's."""
        return self.logits_of(self.hidden(tokens, **forward)).rearrange((BATCH, POSITION, VOCAB))

    def logits_of(self, hidden: NamedArray) -> NamedArray:
        """Float32 logits [vocab, ...] of hidden states [embed, ...], soft cap applied.

        Vocab has the config's `vocab_size` ids: the rows that pad the head give no logits.
        """
        logits = hax.dot(self.output_head, hidden, axis=EMBED, preferred_element_type=jnp.float32)
        if self.config.vocab_size < self.Vocab.size:
            logits = logits[VOCAB, : self.config.vocab_size]
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * hax.tanh(logits / cap)
