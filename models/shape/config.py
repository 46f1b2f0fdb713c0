"""The shape of a transformer, and its parameter counts; imports no JAX.

The counts are exact for the model that `models.transformer` builds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from models.shape.tpu_tiles import SAFE
from models.shape.validation import (
    AtLeastOne,
    Count,
    NotNegative,
    Positive,
    check_fields,
    from_plain,
)
from pipeline.errors import InputError

Kind = tuple[int | None, bool]
"""A layer's window, None for the whole sequence, and whether it has a table of values."""
GATE_INPUTS = 12
"""Features of a block's normalized input that the gate of value embeddings reads; as nanochat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies for sequences longer than the trained context.

    Frequencies of wavelengths above `original_context / low_frequency_factor` are divided by
    `factor`, those of wavelengths below `original_context / high_frequency_factor` stay, and
    between the two they are interpolated linearly (Llama Team, 2024, arXiv:2407.21783, as
    transformers' `rope_type="llama3"`).
    """

    factor: Positive = 8.0
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_context: Count = 8192

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.high_frequency_factor > self.low_frequency_factor:
            raise InputError(
                "RopeScaling.high_frequency_factor: expected more than low_frequency_factor="
                f"{self.low_frequency_factor}, found {self.high_frequency_factor}; "
                "Llama 3 uses 4 and 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071, as transformers' `rope_type="yarn"`).

    Feature pairs that rotate more than `beta_fast` times within the original context keep their
    frequency, pairs that rotate fewer than `beta_slow` times have it divided by `factor`, and
    between the two it is interpolated linearly by the pair's index (sections 3.2 and 3.3). Scores
    are multiplied by the square of `attention_factor` (section 3.4).

    Attributes:
        factor: ratio of the extended context to the original one.
        original_context: positions of the trained context.
        beta_fast, beta_slow: rotations within `original_context`.
        temperature: the attention factor; None for the paper's 0.1 ln(factor) + 1.
    """

    factor: AtLeastOne
    original_context: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    temperature: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.beta_fast > self.beta_slow:
            raise InputError(
                f"YarnScaling.beta_fast: expected more than beta_slow={self.beta_slow}, found "
                f"{self.beta_fast}; the paper uses 32 and 1"
            )

    @property
    def attention_factor(self) -> float:
        """The factor on queries and on keys."""
        if self.temperature is not None:
            return self.temperature
        return 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer with pre-norm blocks and grouped-query attention.

    Attributes:
        vocab_size: number of ids, that of the tokenizer.
        vocab_multiple: embedding and head are padded to a multiple of this many rows, for the
            hardware's tiles and for mesh axes that divide them. Padding has no probability and no
            gradient; its rows count in parameters, memory and FLOPs.
        layers: number of blocks.
        embed: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; each serves `heads / kv_heads` query heads.
        head_size: width of one head; even with rotary positions, which rotate pairs of features.
        mlp: inner width of the MLP.
        mlp_kind: "swiglu" (gate, up and down), "relu2" (ReLU squared), "relu" or "gelu" (tanh form)
            (up and down only).
        norm: "rms" (learnt weight), "plain_rms" (none) or "layer" (LayerNorm, weight and bias).
        biases: add a learnt bias to every projection of the blocks.
        qkv_biases: add a learnt bias to queries, keys and values only (Qwen2).
        positions: "rotary", or "learned" (one added vector per position, up to `context`).
        context: rows of the learned positions; None with rotary ones.
        qk_norm: normalize queries and keys per head, before rotation.
        query_key_scale: factor on the normalized queries and on the normalized keys (nanochat:
            1.2).
        embedding_norm: divide each embedded token by its root mean square before the first block
            (nanochat); no weights.
        residual_scale: learnt factors on the residual stream, one per layer, before each block;
            initial values of the first and of the last layer, linear in between (nanochat: 1.15,
            1.05). None for no factor.
        input_scale: the same on the first block's input, which is added to the residual stream
            before each block (nanochat: 0.2, 0.05). None to add nothing.
        value_embeddings: "alternate" adds rows of tables to the values of every second layer, the
            last included, see `models.layers.value_embedding`.
        tied: the embedding is also the output head.
        window_pattern: one letter per layer, repeated: "L" attends to the whole sequence, "S" only
            to the last `window` positions, own position included. The last layer is "L" if the
            pattern has an "L".
        window: positions an "S" layer attends to; None with patterns of "L" only.
        rope_base: base of the rotary frequencies.
        rope_scaling: `RopeScaling` (Llama 3) or `YarnScaling`; None for no scaling.
        norm_epsilon: added to the mean square in every norm.
        logit_soft_cap: c in c * tanh(logits / c) over the vocabulary, None for no cap.
        attention_soft_cap: the same for attention scores.
        init_scale: factor on the initial standard deviation of every matrix of the blocks.
        mlp_init_scale: a further factor on that of the MLP's input matrices (nanochat: 0.4).
        embedding_std: initial standard deviation of the embedding and of an untied head.
        head_std: that of an untied head (nanochat: 0.001); None for `embedding_std`.
        zero_outputs: matrices that write to the residual stream start at zero.
    """

    vocab_size: Count
    vocab_multiple: Count = 1
    layers: Count
    embed: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    mlp: Count
    mlp_kind: Literal["swiglu", "relu2", "relu", "gelu"] = "swiglu"
    norm: Literal["rms", "plain_rms", "layer"] = "rms"
    biases: bool = False
    qkv_biases: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    context: Count | None = None
    qk_norm: bool = True
    query_key_scale: Positive = 1.0
    embedding_norm: bool = False
    residual_scale: tuple[NotNegative, NotNegative] | None = None
    input_scale: tuple[NotNegative, NotNegative] | None = None
    value_embeddings: Literal["none", "alternate"] = "none"
    tied: bool = True
    window_pattern: Annotated[str, Meta(pattern="^[LS]+$")] = "L"
    window: Count | None = None
    rope_base: Positive = 10_000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    norm_epsilon: Positive = 1e-6
    logit_soft_cap: Positive | None = None
    attention_soft_cap: Positive | None = None
    init_scale: Positive = 1.0
    mlp_init_scale: Positive = 1.0
    embedding_std: Positive = 0.02
    head_std: Positive | None = None
    zero_outputs: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("residual_scale", "input_scale"):  # a list passes, and has no hash
            if isinstance(ends := getattr(self, name), list):
                object.__setattr__(self, name, tuple(ends))
        owner = "TransformerConfig"
        if self.heads % self.kv_heads:
            raise InputError(
                f"{owner}.kv_heads: expected a divisor of heads={self.heads}, found "
                f"{self.kv_heads}; every key/value head must serve the same number of query heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise InputError(
                f"{owner}.head_size: expected an even number, found {self.head_size}; "
                "rotary positions rotate pairs of features"
            )
        if ("S" in self.window_pattern) != (self.window is not None):
            raise InputError(
                f"{owner}.window: expected a width exactly where window_pattern has an S, "
                f"found {self.window} with pattern {self.window_pattern!r}; set both or neither"
            )
        if (self.positions == "learned") != (self.context is not None):
            raise InputError(
                f"{owner}.context: expected a length exactly with positions='learned', "
                f"found {self.context} with {self.positions!r}; set both or neither"
            )
        if self.query_key_scale != 1 and not self.qk_norm:
            raise InputError(
                f"{owner}.query_key_scale: expected 1 without qk_norm, found "
                f"{self.query_key_scale}; set qk_norm, or scale the initial values by init_scale"
            )
        if self.head_std is not None and self.tied:
            raise InputError(
                f"{owner}.head_std: expected None with tied=True, found {self.head_std}; a tied "
                "head is the embedding: set embedding_std, or tied=False"
            )

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """A config from the JSON of `dataclasses.asdict`; absent fields have their defaults."""
        return from_plain(cls, fields)

    @property
    def score_scale(self) -> float:
        """The factor on queries alone: head_size^-0.5, and squared those on queries and on keys,
        which are YaRN's attention factor and `query_key_scale`."""
        scaling = self.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        return self.head_size**-0.5 * factor**2 * self.query_key_scale**2

    @property
    def small_scores(self) -> bool:
        """Whether QK-norm, with weights of 1, allows no score beyond `SAFE`: |q| |k| is then
        head_size times `score_scale`."""
        return self.qk_norm and self.head_size * self.score_scale <= SAFE

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def q_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer, None for the whole sequence; see `window_pattern`."""
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.layers)]
        if "L" in self.window_pattern:
            letters[-1] = "L"
        return tuple(None if letter == "L" else self.window for letter in letters)

    @property
    def value_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a table of `value_embeddings`."""
        alternate = self.value_embeddings == "alternate"
        return tuple(alternate and i % 2 == 0 for i in range(self.layers))[::-1]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(zip(self.windows, self.value_layers, strict=True))

    @property
    def value_parameters(self) -> tuple[int, int]:
        """Parameters of the tables of `value_embeddings`, and of their gates."""
        heads = self.kv_heads * sum(self.value_layers)
        rows = self.padded_vocab_size * self.head_size
        return rows * heads, min(GATE_INPUTS, self.embed) * heads

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matmuls with every token: matrices of the blocks, gates, the output head.

        The head counts once, tied or not; a lookup in a table is a gather and does not count.
        """
        attention = 2 * self.embed * self.head_size * (self.heads + self.kv_heads)
        mlp = (3 if self.mlp_kind == "swiglu" else 2) * self.embed * self.mlp
        blocks = self.layers * (attention + mlp) + self.value_parameters[1]
        return blocks + self.padded_vocab_size * self.embed

    @property
    def parameter_count(self) -> int:
        gathered = 0 if self.tied else self.padded_vocab_size * self.embed
        gathered += (self.context or 0) * self.embed + self.value_parameters[0]
        norms = 2 * self.embed + (2 * self.head_size if self.qk_norm else 0)
        per_feature = {"rms": 1, "plain_rms": 0, "layer": 2}[self.norm]
        biases = 0
        if self.biases or self.qkv_biases:
            biases += self.head_size * (self.heads + 2 * self.kv_heads)
        if self.biases:
            biases += 2 * self.embed + (2 if self.mlp_kind == "swiglu" else 1) * self.mlp
        scalars = (self.residual_scale is not None) + (self.input_scale is not None)
        vectors = self.layers * (per_feature * norms + biases + scalars) + per_feature * self.embed
        return self.matmul_parameters + vectors + gathered
