"""The mapping between our arrays and the tensors of other projects, and the conversion of values.

Values are only transposed, concatenated or negated, so that a tensor that is exported and imported
again has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.shape.config import TransformerConfig

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ArrayPart:
    """One of our arrays, or a layer of one, as a matrix or a vector."""

    path: str  # in a `Transformer`, such as "blocks.stacked.mlp.up.matrix"
    layer: int | None  # index in the array's first axis; None where it has no axis of layers
    shape: tuple[int, ...]  # (in, out), (rows, embed) of a table without padding, or (features,)


@dataclass(frozen=True)
class Tensor:
    """A tensor in the files of another project.

    `mirrored` is the head size where the second half of each head's features has the opposite sign,
    as the other project rotates in the opposite direction.
    """

    name: str
    parts: tuple[ArrayPart, ...]  # concatenated along the last axis
    transposed: bool = False  # stored as [out, in]; ours are [in, out]
    mirrored: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        *front, _ = self.parts[0].shape
        whole = (*front, sum(part.shape[-1] for part in self.parts))
        return whole[::-1] if self.transposed else whole

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor from the values of its parts, each reshaped to `Part.shape` first."""
        import numpy as np

        whole = [v.reshape(p.shape) for v, p in zip(parts, self.parts, strict=True)]
        joined = whole[0] if len(whole) == 1 else np.concatenate(whole, axis=-1)
        joined = self._signed(joined)
        return joined.T if self.transposed else joined

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """The values of its parts, each of `Part.shape`; the inverse of `join`."""
        import numpy as np

        joined = self._signed(values.T if self.transposed else values)
        ends = np.cumsum([part.shape[-1] for part in self.parts])[:-1]
        return np.split(joined, ends, axis=-1)

    def _signed(self, joined: np.ndarray) -> np.ndarray:
        if not self.mirrored:
            return joined
        heads = joined.reshape(*joined.shape[:-1], -1, 2, self.mirrored // 2).copy()
        heads[..., 1, :] *= -1
        return heads.reshape(joined.shape)


_QKV = ("attention.query", "attention.key", "attention.value")
_PLAIN_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_NANOCHAT_NAMES = {**_PLAIN_NAMES, "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
_GPT2_NAMES = {
    "attn.c_attn": _QKV,
    "ln_1": ("attention_norm",),
    "ln_2": ("mlp_norm",),
    "attn.c_proj": ("attention.output",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}


def rotary_tensors(config: TransformerConfig, *, nanochat: bool = False) -> Iterator[Tensor]:
    """Tensors of Llama and of the architectures with its names: Mistral, Qwen2, Qwen3, NanoChat."""
    names = _NANOCHAT_NAMES if nanochat else _PLAIN_NAMES
    yield _table("model.embed_tokens.weight", "embedding", config.vocab_size, config)
    for layer in range(config.layers):
        for path, shape in _arrays(config).items():
            at, matrix = f"model.layers.{layer}.{names[path]}", len(shape) == 2
            turned = config.head_size if nanochat and path.endswith(("query", "key")) else 0
            part = (_part(path, "weight", layer, shape),)
            yield Tensor(f"{at}.weight", part, transposed=matrix, mirrored=turned)
            if matrix and (config.biases or (config.qkv_biases and path in _QKV)):
                yield Tensor(f"{at}.bias", (_part(path, "bias", layer, shape),))
    if config.norm != "plain_rms":
        yield Tensor("model.norm.weight", (ArrayPart("final_norm.weight", None, (config.embed,)),))
    if not config.tied:
        yield _table("lm_head.weight", "head", config.vocab_size, config)


def gpt2_tensors(config: TransformerConfig) -> Iterator[Tensor]:
    """Tensors of GPT-2: matrices are [in, out]; queries, keys and values share one matrix."""
    assert config.context is not None
    yield _table("transformer.wte.weight", "embedding", config.vocab_size, config)
    yield _table("transformer.wpe.weight", "position_embedding", config.context, config)
    shapes = _arrays(config)
    for layer in range(config.layers):
        for name, paths in _GPT2_NAMES.items():
            for kind in ("weight", "bias"):
                parts = tuple(_part(path, kind, layer, shapes[path]) for path in paths)
                yield Tensor(f"transformer.h.{layer}.{name}.{kind}", parts)
    for kind in ("weight", "bias"):
        part = ArrayPart(f"final_norm.{kind}", None, (config.embed,))
        yield Tensor(f"transformer.ln_f.{kind}", (part,))
    if not config.tied:
        yield _table("lm_head.weight", "head", config.vocab_size, config)


def _table(name: str, path: str, rows: int, config: TransformerConfig) -> Tensor:
    return Tensor(name, (ArrayPart(path, None, (rows, config.embed)),))


def _part(path: str, kind: str, layer: int, shape: tuple[int, ...]) -> ArrayPart:
    """The weight or the bias of a norm or a matrix of a block."""
    if len(shape) == 2:
        kind, shape = ("matrix", shape) if kind == "weight" else (kind, shape[1:])
    return ArrayPart(f"blocks.stacked.{path}.{kind}", layer, shape)


def _arrays(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """(in, out) of each matrix of a block, then (features,) of each norm that has a weight."""
    embed, size = config.embed, config.head_size
    queries, kv = config.heads * size, config.kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "attention.query": (embed, queries),
        "attention.key": (embed, kv),
        "attention.value": (embed, kv),
        "attention.output": (queries, embed),
        "mlp.up": (embed, config.mlp),
        "mlp.down": (config.mlp, embed),
    }
    if config.mlp_kind == "swiglu":
        shapes["mlp.gate"] = (embed, config.mlp)
    if config.norm != "plain_rms":
        shapes |= dict.fromkeys(("attention_norm", "mlp_norm"), (embed,))
        if config.qk_norm:
            shapes |= dict.fromkeys(("attention.query_norm", "attention.key_norm"), (size,))
    return shapes
