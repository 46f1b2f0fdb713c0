"""The shape of a transformer, and the counts that follow from it.

Everything here is arithmetic on integers: planning, pricing and fingerprints read it without JAX.
The counts are exact for the model that `models.transformer` builds (a test compares them with the
arrays), so a number shown before a run is the number of the run.
"""

from __future__ import annotations

import dataclasses

from pipeline.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only transformer: pre-norm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's number of ids.
        layers: number of blocks.
        embed: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads; each serves `heads / kv_heads` query heads.
        head_size: width of one head; even, because rotary positions turn pairs.
        mlp: inner width of the SwiGLU.
        qk_norm: RMS-normalise queries and keys per head, with a learnt weight, before rotation.
        tied: the embedding is also the output head.
        rope_base: base of the rotary frequencies.
        norm_epsilon: added to the mean square in every norm.
        logit_soft_cap: c in c * tanh(logits / c) over the vocabulary, None for no cap.
        attention_soft_cap: the same for attention scores.
        init_scale: factor on the initial 1/sqrt(fan_in) of every matrix of the blocks.
        embedding_std: initial standard deviation of the embedding and of an untied head.
    """

    vocab_size: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    qk_norm: bool = True
    tied: bool = True
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    logit_soft_cap: float | None = None
    attention_soft_cap: float | None = None
    init_scale: float = 1.0
    embedding_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "embed", "heads", "kv_heads", "head_size", "mlp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(
                    f"TransformerConfig.{name}: expected a positive integer, found {value!r}; "
                    "give a whole number of at least 1"
                )
        for name in ("rope_base", "norm_epsilon", "init_scale", "embedding_std"):
            self._check_positive(name, getattr(self, name))
        for name in ("logit_soft_cap", "attention_soft_cap"):
            if getattr(self, name) is not None:
                self._check_positive(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise InputError(
                f"TransformerConfig.kv_heads: expected a divisor of heads={self.heads}, found "
                f"{self.kv_heads}; every key/value head must serve the same number of query heads"
            )
        if self.head_size % 2:
            raise InputError(
                f"TransformerConfig.head_size: expected an even number, found {self.head_size}; "
                "rotary positions turn pairs of features"
            )

    @staticmethod
    def _check_positive(name: str, value: float) -> None:
        if not 0 < value < float("inf"):
            raise InputError(
                f"TransformerConfig.{name}: expected a finite number above 0, found {value!r}; "
                "leave the field out to get its default"
            )

    @property
    def q_per_kv(self) -> int:
        """Query heads served by one key/value head."""
        return self.heads // self.kv_heads

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: the blocks' matrices and the output head.

        The head counts once, tied or not; the embedding's gather does not.
        """
        attention = 2 * self.embed * self.head_size * (self.heads + self.kv_heads)
        mlp = 3 * self.embed * self.mlp
        return self.layers * (attention + mlp) + self.vocab_size * self.embed

    @property
    def norm_parameters(self) -> int:
        """Weights of all norms: two per block, two per head width with qk_norm, one at the end."""
        per_block = 2 * self.embed + (2 * self.head_size if self.qk_norm else 0)
        return self.layers * per_block + self.embed

    @property
    def parameter_count(self) -> int:
        """All learnt numbers."""
        gathered = 0 if self.tied else self.vocab_size * self.embed
        return self.matmul_parameters + self.norm_parameters + gathered
