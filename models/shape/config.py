"""The shape of a transformer, and its parameter counts.

Imports no JAX: planning, cost estimates and recipes use it. The counts are exact for the model that
`models.transformer` builds (a test compares them with the arrays).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InputError

MLP_KINDS = ("swiglu", "relu2", "relu", "gelu")
NORM_KINDS = ("rms", "plain_rms", "layer")
POSITION_KINDS = ("rotary", "learned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies for sequences longer than the trained context.

    Frequencies of wavelengths above `original_context / low_frequency_factor` are divided by
    `factor`, those of wavelengths below `original_context / high_frequency_factor` stay, and
    between the two the frequency is interpolated linearly (Llama Team, 2024, arXiv:2407.21783, as
    in the released code and transformers' `rope_type="llama3"`).
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_frequency_factor", "original_context"):
            _check_positive("RopeScaling", name, getattr(self, name))
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

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("original_context", "beta_slow"):
            _check_positive("YarnScaling", name, getattr(self, name))
        if not 1 <= self.factor < float("inf"):
            raise InputError(
                f"YarnScaling.factor: expected at least 1, found {self.factor}; 1 is no scaling"
            )
        if not self.beta_fast > self.beta_slow:
            raise InputError(
                f"YarnScaling.beta_fast: expected more than beta_slow={self.beta_slow}, found "
                f"{self.beta_fast}; the paper uses 32 and 1"
            )
        if self.temperature is not None:
            _check_positive("YarnScaling", "temperature", self.temperature)

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
        embedding_norm: divide each embedded token by its root mean square before the first block
            (nanochat); no weights.
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
        embedding_std: initial standard deviation of the embedding and of an untied head.
        zero_outputs: matrices that write to the residual stream start at zero.
    """

    vocab_size: int
    vocab_multiple: int = 1
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    mlp_kind: str = "swiglu"
    norm: str = "rms"
    biases: bool = False
    qkv_biases: bool = False
    positions: str = "rotary"
    context: int | None = None
    qk_norm: bool = True
    embedding_norm: bool = False
    tied: bool = True
    window_pattern: str = "L"
    window: int | None = None
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    norm_epsilon: float = 1e-6
    logit_soft_cap: float | None = None
    attention_soft_cap: float | None = None
    init_scale: float = 1.0
    embedding_std: float = 0.02
    zero_outputs: bool = False

    def __post_init__(self) -> None:
        owner = "TransformerConfig"
        for name in (
            *("vocab_size", "vocab_multiple", "layers", "embed"),
            *("heads", "kv_heads", "head_size", "mlp"),
        ):
            _check_count(owner, name, getattr(self, name))
        for name in ("window", "context"):
            if getattr(self, name) is not None:
                _check_count(owner, name, getattr(self, name))
        for name in ("rope_base", "norm_epsilon", "init_scale", "embedding_std"):
            _check_positive(owner, name, getattr(self, name))
        for name in ("logit_soft_cap", "attention_soft_cap"):
            if getattr(self, name) is not None:
                _check_positive(owner, name, getattr(self, name))
        for name, allowed in (
            ("mlp_kind", MLP_KINDS),
            ("norm", NORM_KINDS),
            ("positions", POSITION_KINDS),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"{owner}.{name}: expected one of {', '.join(allowed)}, found "
                    f"{getattr(self, name)!r}; give one of them"
                )
        self._check_heads()
        self._check_positions()

    def _check_heads(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(
                f"TransformerConfig.kv_heads: expected a divisor of heads={self.heads}, found "
                f"{self.kv_heads}; every key/value head must serve the same number of query heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise InputError(
                f"TransformerConfig.head_size: expected an even number, found {self.head_size}; "
                "rotary positions rotate pairs of features"
            )

    def _check_positions(self) -> None:
        pattern = self.window_pattern
        if not pattern or set(pattern) - set("LS"):
            raise InputError(
                f"TransformerConfig.window_pattern: expected letters L (long) and S (short), found "
                f"{pattern!r}; SSSL is three short layers before each long one"
            )
        if ("S" in pattern) != (self.window is not None):
            raise InputError(
                "TransformerConfig.window: expected a width exactly where window_pattern has an S, "
                f"found {self.window} with pattern {pattern!r}; set both or neither"
            )
        if (self.positions == "learned") != (self.context is not None):
            raise InputError(
                "TransformerConfig.context: expected a length exactly with positions='learned', "
                f"found {self.context} with {self.positions!r}; set both or neither"
            )

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """The config of a `dataclasses.asdict` dictionary, also after a round trip through JSON."""
        scaling = fields.get("rope_scaling")
        if scaling is not None:
            # The dictionary does not name the class; only YarnScaling has beta_fast.
            scaling = (YarnScaling if "beta_fast" in scaling else RopeScaling)(**scaling)
        rebuilt: dict[str, Any] = {**fields, "rope_scaling": scaling}
        return cls(**rebuilt)

    @property
    def score_scale(self) -> float:
        """The factor on queries: head_size^-0.5, times YaRN's attention factor squared."""
        scaling = self.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        return self.head_size**-0.5 * factor**2

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def q_per_kv(self) -> int:
        """Query heads served by one key/value head."""
        return self.heads // self.kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer, None for the whole sequence; see `window_pattern`."""
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.layers)]
        if "L" in self.window_pattern:
            letters[-1] = "L"
        return tuple(None if letter == "L" else self.window for letter in letters)

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of one MLP: 3 with a gate, else 2."""
        return 3 if self.mlp_kind == "swiglu" else 2

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matmuls with every token: the blocks' matrices and the output head.

        The head counts once, tied or not; the embedding lookup is a gather and does not count.
        """
        attention = 2 * self.embed * self.head_size * (self.heads + self.kv_heads)
        mlp = self.mlp_matrices * self.embed * self.mlp
        return self.layers * (attention + mlp) + self.padded_vocab_size * self.embed

    @property
    def norm_parameters(self) -> int:
        """Weights and biases of all norms: 2 per block, 2 more with qk_norm, and the final norm."""
        per_feature = {"rms": 1, "plain_rms": 0, "layer": 2}[self.norm]
        per_block = 2 * self.embed + (2 * self.head_size if self.qk_norm else 0)
        return per_feature * (self.layers * per_block + self.embed)

    @property
    def bias_parameters(self) -> int:
        """Biases of the blocks' projections."""
        qkv = self.head_size * (self.heads + 2 * self.kv_heads)
        others = 2 * self.embed + (self.mlp_matrices - 1) * self.mlp
        with_qkv = self.biases or self.qkv_biases
        return self.layers * ((qkv if with_qkv else 0) + (others if self.biases else 0))

    @property
    def parameter_count(self) -> int:
        """Number of all parameters."""
        gathered = 0 if self.tied else self.padded_vocab_size * self.embed
        gathered += (self.context or 0) * self.embed
        return self.matmul_parameters + self.norm_parameters + self.bias_parameters + gathered


CHANGEABLE = (
    *("window_pattern", "window", "rope_base", "rope_scaling"),
    *("norm_epsilon", "logit_soft_cap", "attention_soft_cap"),
)
"""Fields of `TransformerConfig` that may change for trained parameters; no array depends on one."""


def check_same_parameters(old: TransformerConfig, new: TransformerConfig) -> None:
    """Refuse to go on with a model's parameters as another model than `CHANGEABLE` allows.

    Raises:
        InputError: names the other fields that differ.
    """
    changed = [
        f"{field.name} {getattr(old, field.name)!r} -> {getattr(new, field.name)!r}"
        for field in dataclasses.fields(old)
        if field.name not in CHANGEABLE and getattr(old, field.name) != getattr(new, field.name)
    ]
    if changed:
        raise InputError(
            f"model: {', '.join(changed)}: trained parameters keep their arrays and their use; "
            f"expected changes of {', '.join(CHANGEABLE)} only"
        )


def _check_count(owner: str, name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InputError(
            f"{owner}.{name}: expected a positive integer, found {value!r}; "
            "give a whole number of at least 1"
        )


def _check_positive(owner: str, name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InputError(
            f"{owner}.{name}: expected a finite number above 0, found {value!r}; "
            "leave the field out to get its default"
        )
