"""The transformer: embedding, a scanned stack of pre-norm blocks, a final norm, the output head.

All blocks are one module whose arrays have a "layers" axis (`hax.Stacked`). Parameters are made in
float32. A forward pass multiplies in the dtype of the parameters that it is given (see
`models.layers.norms.cast`); norm statistics, softmax and logits are float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import models.named as hax
from models.attention.dispatch import attend
from models.attention.reference import Mask
from models.layers.axes import (
    BATCH,
    EMBED,
    FEATURES_FIRST,
    POSITION,
    TOKENS_FIRST,
    VOCAB,
    MeshAxes,
    ModelAxes,
    model_axes,
)
from models.layers.block import Attention, Mlp, mixed, rotary_angles
from models.layers.embedding import look_up, take_rows
from models.layers.linear import per_layer, truncated
from models.layers.norms import Norm
from models.layers.scan_layers import apply_layers, checkpoint_policy
from models.layers.value_embedding import NO_VALUES, Values, add_rows, rows_of, tables_and_gates
from models.named import Axis, NamedArray
from models.shape.config import Kind, TransformerConfig
from models.shape.footprint import cycles_of
from models.shape.remat_names import BLOCK_INPUT
from pipeline.errors import InputError

Attend = Callable[[NamedArray, NamedArray, NamedArray], NamedArray]
"""Attention of scaled queries to keys and values; the result has the queries' axes."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """How a forward pass is computed; no option changes the result beyond rounding."""

    remat: str = "full"  # what the backward pass keeps, see `models.shape.remat_names`
    backend: str = "reference"  # see `models.attention.backend_choice.choose_backend`
    mesh_axes: MeshAxes | None = None  # for the code under `jax.shard_map`; None on one device
    interpret: bool = False  # run kernels in the Pallas interpreter (tests on the CPU)
    features_first: bool = False  # order of the activations' axes, see `models.layers.linear`
    unroll: int = 1  # cycles of layers per iteration of the compiled loop
    gather: Callable[[Any], Any] | None = None  # of a layer's parameters, before it runs


DEFAULT = Forward()


class Block(eqx.Module):
    """x + attention(norm(x)), then the same with the MLP; before it the mix of `mixed`."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    residual_scale: NamedArray | None  # float32 scalar, as is the next
    input_scale: NamedArray | None

    @staticmethod
    def init(
        config: TransformerConfig,
        axes: ModelAxes,
        scales: tuple[NamedArray | None, NamedArray | None],
        *,
        key: jax.Array,
    ) -> Block:
        """Float32 parameters; `scales` are `residual_scale` and `input_scale`."""
        attention, mlp = jax.random.split(key, 2)
        return Block(
            attention_norm=Norm.init(axes.Embed, config),
            attention=Attention.init(config, axes, key=attention),
            mlp_norm=Norm.init(axes.Embed, config),
            mlp=Mlp.init(config, axes, key=mlp),
            residual_scale=scales[0],
            input_scale=scales[1],
        )

    def __call__(
        self,
        x: NamedArray,
        angles: NamedArray | None,
        attend: Attend,
        start: NamedArray | None = None,
        values: Values = NO_VALUES,
    ) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
        """The residual stream, with axes and dtype of `x`, and keys and values for a KV cache.

        `angles` are those of `Attention.heads`; `start` is the first block's input.
        """
        x = hax.tree_checkpoint_name(x, BLOCK_INPUT)
        x = mixed(x, start, self.residual_scale, self.input_scale)
        attention_input = hax.tree_checkpoint_name(self.attention_norm(x), "attention_input")
        q, k, v = self.attention.heads(attention_input, angles)
        v = add_rows(v, attention_input, values)
        x = x + self.attention.merge(attend(q, k, v), attention_input)
        x = hax.tree_checkpoint_name(hax.auto_sharded(x), "mlp_input")
        return hax.auto_sharded(x + self.mlp(self.mlp_norm(x))), (k, v)


class Transformer(eqx.Module):
    """A decoder-only language model."""

    embedding: NamedArray  # [vocab, embed]
    value_embedding: NamedArray | None  # as value_gate, see `tables_and_gates`
    value_gate: NamedArray | None
    position_embedding: NamedArray | None  # [position, embed]; None with rotary positions
    blocks: hax.Stacked[Block]  # along "layers"
    final_norm: Norm
    head: NamedArray | None  # [vocab, embed]; None with a tied embedding
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: jax.Array) -> Transformer:
        """Float32 parameters, distributed as in `models.layers.linear`."""
        axes = model_axes(config)
        embedding, blocks, of_head = jax.random.split(key, 3)
        table = (axes.Vocab, axes.Embed)
        stack = hax.Stacked.init(axes.Layers, Block)
        scales = per_layer(config.residual_scale, axes), per_layer(config.input_scale, axes)
        value_embedding, value_gate = tables_and_gates(embedding, config, axes)
        learned, head_std = None, config.head_std or config.embedding_std
        if config.context is not None:
            rows = (Axis(POSITION, config.context), axes.Embed)
            learned = truncated(jax.random.fold_in(embedding, 1), rows, config.embedding_std)
        return Transformer(
            embedding=truncated(embedding, table, config.embedding_std),
            value_embedding=value_embedding,
            value_gate=value_gate,
            position_embedding=learned,
            blocks=stack(config, axes, scales, key=jax.random.split(blocks, config.layers)),
            final_norm=Norm.init(axes.Embed, config),
            head=None if config.tied else truncated(of_head, table, head_std),
            config=config,
        )

    @property
    def Vocab(self) -> Axis:
        """The vocabulary axis of embedding and head, padding included."""
        return self.embedding.resolve_axis(VOCAB)

    @property
    def output_head(self) -> NamedArray:
        """The matrix [vocab, embed] of the logits: the head, or the tied embedding."""
        return self.embedding if self.head is None else self.head

    def hidden(
        self,
        tokens: NamedArray,
        segment_ids: NamedArray | None = None,
        *,
        forward: Forward = DEFAULT,
    ) -> NamedArray:
        """Hidden states after the final norm, with axes embed, batch and position in some order.

        Args:
            tokens: int32 [batch, position], ids inside the vocabulary: this is not checked.
            segment_ids: int32 [batch, position]; position i attends to the positions 0..i with its
                id, and learned positions begin anew with each id. Default: one segment.
        """
        order = FEATURES_FIRST if forward.features_first else TOKENS_FIRST
        restarts = None
        if segment_ids is not None and self.position_embedding is not None:
            restarts = _positions_in(segment_ids)
        x, angles = self.embed(tokens, order, forward.mesh_axes, restarts)
        values, start = self.values(tokens, order, forward.mesh_axes), x
        how = {name: getattr(forward, name) for name in ("backend", "mesh_axes", "interpret")}
        cap, small = self.config.attention_soft_cap, self.config.small_scores

        def apply(layer: tuple[Block, Values], x: NamedArray, kind: Kind) -> NamedArray:
            block, values = layer
            block = block if forward.gather is None else forward.gather(block)
            attention = partial(attend, mask=Mask(kind[0], cap, segment_ids, small), **how)
            return block(x, angles, attention, start, values)[0]

        policy = checkpoint_policy(forward.remat)
        kinds, unroll = self.config.kinds, forward.unroll
        if policy is not None:
            # Forward and backward pass are separate scans, so XLA's CSE cannot merge the
            # recomputation with the forward pass. But where the scan's body has several blocks, XLA
            # would without `prevent_cse` recompute all of them before the last one needs it.
            several = unroll > 1 or cycles_of(kinds) != (1, len(kinds))
            apply = eqx.filter_checkpoint(apply, policy=policy, prevent_cse=several)
        layers, owners = (self.blocks.stacked, values), self.config.value_layers
        x = apply_layers(layers, x, apply, kinds, unroll=unroll, owners=owners)
        return self.final_norm(x)

    def values(
        self, tokens: NamedArray, order: tuple[str, ...], mesh_axes: MeshAxes | None = None
    ) -> Values:
        """Rows for int32 tokens [batch, ...], see `rows_of`, and gates of the layers with both."""
        table = self.value_embedding
        return None if table is None else rows_of(table, tokens, order, mesh_axes), self.value_gate

    def embed(
        self,
        tokens: NamedArray,
        order: tuple[str, ...],
        mesh_axes: MeshAxes | None = None,
        positions: NamedArray | None = None,
    ) -> tuple[NamedArray, NamedArray | None]:
        """The input of the first block, with its axes in `order`, and rotary angles or None.

        `tokens` are int32 [batch, position], or [batch] for one position of each row; `positions`
        have their axes, by default each token's index in its row.
        """
        at = tokens.resolve_axis(POSITION) if positions is None else positions
        tokens = tokens.rearrange((BATCH, ...))
        table = self.embedding.rearrange((VOCAB, EMBED))
        rows = look_up(table.array, tokens.array, mesh_axes)
        x = hax.named(rows, (*tokens.axes, table.resolve_axis(EMBED)))
        if self.config.embedding_norm:
            x = Norm(None, None, EMBED, False, self.config.norm_epsilon)(x)
        if self.position_embedding is None:
            config, axes = self.config, model_axes(self.config)
            angles = rotary_angles(at, axes.HeadSize, config.rope_base, config.rope_scaling)
            return hax.auto_sharded(x.rearrange(order)), angles
        if isinstance(at, Axis):
            context = self.position_embedding.resolve_axis(POSITION).size
            if at.size > context:
                raise InputError(
                    f"tokens: expected at most {context} positions, the number of learned "
                    f"positions, found {at.size}; shorten the sequences or raise the config's "
                    "context"
                )
            learned = self.position_embedding[POSITION, : at.size]
        else:
            rows = self.position_embedding.rearrange((POSITION, EMBED))
            found = take_rows(rows.array, at.array)
            learned = hax.named(found, (*at.axes, rows.resolve_axis(EMBED)))
        # In float32, as then is the sum over the batch that is their gradient.
        wide = x.astype(jnp.float32) + learned.astype(jnp.float32)
        return hax.auto_sharded(wide.astype(x.dtype).rearrange(order)), None

    def logits(
        self,
        tokens: NamedArray,
        segment_ids: NamedArray | None = None,
        *,
        forward: Forward = DEFAULT,
    ) -> NamedArray:
        """Float32 next-token logits [batch, position, vocab], without the vocabulary's padding."""
        hidden = self.hidden(tokens, segment_ids, forward=forward)
        return self.logits_of(hidden).rearrange((BATCH, POSITION, VOCAB))

    def logits_of(self, hidden: NamedArray) -> NamedArray:
        """Float32 logits [vocab, ...] of hidden states [embed, ...], without padding ids."""
        logits = hax.dot(self.output_head, hidden, axis=EMBED, preferred_element_type=jnp.float32)
        if self.config.vocab_size < self.Vocab.size:
            logits = logits[VOCAB, : self.config.vocab_size]
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * hax.tanh(logits / cap)


def _positions_in(segment_ids: NamedArray) -> NamedArray:
    """Index of each token in its run of equal ids: int32 [batch, position]."""
    ids = segment_ids.rearrange((BATCH, POSITION))
    index = jnp.arange(ids.array.shape[1], dtype=jnp.int32)[None]
    begins = jnp.diff(ids.array, axis=1, prepend=ids.array[:, :1]) != 0
    starts = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return hax.named(index - starts, ids.axes)
