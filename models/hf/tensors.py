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
    because the other project rotates in the opposite direction; 0 for the same sign.
    """

    name: str
    parts: tuple[ArrayPart, ...]  # concatenated along the last axis
    transposed: bool = False  # stored as [out, in]; ours are [in, out]
    mirrored: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the files."""
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


_ATTENTION = ("query", "key", "value", "output")
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
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def rotary_tensors(config: TransformerConfig, *, nanochat: bool = False) -> Iterator[Tensor]:
    """Tensors of Llama and of the architectures with its names: Mistral, Qwen2, Qwen3, NanoChat."""
    names = _NANOCHAT_NAMES if nanochat else _PLAIN_NAMES
    yield _table("model.embed_tokens.weight", "embedding", config.vocab_size, config)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        for path, shape in _matrices(config).items():
            turned = config.head_size if nanochat and path.endswith(("query", "key")) else 0
            part = ArrayPart(f"blocks.stacked.{path}.matrix", layer, shape)
            yield Tensor(f"{at}{names[path]}.weight", (part,), transposed=True, mirrored=turned)
            if _has_bias(config, path):
                bias = ArrayPart(f"blocks.stacked.{path}.bias", layer, shape[1:])
                yield Tensor(f"{at}{names[path]}.bias", (bias,))
        for path, size in _norms(config).items():
            part = ArrayPart(f"blocks.stacked.{path}.weight", layer, (size,))
            yield Tensor(f"{at}{names[path]}.weight", (part,))
    if config.norm != "plain_rms":
        yield Tensor("model.norm.weight", (ArrayPart("final_norm.weight", None, (config.embed,)),))
    if not config.tied:
        yield _table("lm_head.weight", "head", config.vocab_size, config)


def gpt2_tensors(config: TransformerConfig) -> Iterator[Tensor]:
    """Tensors of GPT-2: matrices are [in, out]; queries, keys and values share one matrix."""
    assert config.context is not None
    yield _table("transformer.wte.weight", "embedding", config.vocab_size, config)
    yield _table("transformer.wpe.weight", "position_embedding", config.context, config)
    matrices = _matrices(config)
    for layer in range(config.layers):
        at, stacked = f"transformer.h.{layer}.", "blocks.stacked"
        qkv = [
            (f"{stacked}.attention.{name}", matrices[f"attention.{name}"]) for name in _ATTENTION
        ]
        yield Tensor(
            f"{at}attn.c_attn.weight",
            tuple(ArrayPart(f"{path}.matrix", layer, shape) for path, shape in qkv[:3]),
        )
        yield Tensor(
            f"{at}attn.c_attn.bias",
            tuple(ArrayPart(f"{path}.bias", layer, shape[1:]) for path, shape in qkv[:3]),
        )
        for path, name in _GPT2_NAMES.items():
            if path in matrices:
                shape = matrices[path]
                part = ArrayPart(f"{stacked}.{path}.matrix", layer, shape)
                yield Tensor(f"{at}{name}.weight", (part,))
                yield Tensor(
                    f"{at}{name}.bias", (ArrayPart(f"{stacked}.{path}.bias", layer, shape[1:]),)
                )
            else:
                for kind in ("weight", "bias"):
                    part = ArrayPart(f"{stacked}.{path}.{kind}", layer, (config.embed,))
                    yield Tensor(f"{at}{name}.{kind}", (part,))
    for kind in ("weight", "bias"):
        part = ArrayPart(f"final_norm.{kind}", None, (config.embed,))
        yield Tensor(f"transformer.ln_f.{kind}", (part,))
    if not config.tied:
        yield _table("lm_head.weight", "head", config.vocab_size, config)


def _table(name: str, path: str, rows: int, config: TransformerConfig) -> Tensor:
    return Tensor(name, (ArrayPart(path, None, (rows, config.embed)),))


def _matrices(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each matrix of a block."""
    queries, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes = {
        "attention.query": (config.embed, queries),
        "attention.key": (config.embed, kv),
        "attention.value": (config.embed, kv),
        "attention.output": (queries, config.embed),
        "mlp.up": (config.embed, config.mlp),
        "mlp.down": (config.mlp, config.embed),
    }
    if config.mlp_kind == "swiglu":
        shapes["mlp.gate"] = (config.embed, config.mlp)
    return shapes


def _has_bias(config: TransformerConfig, path: str) -> bool:
    return config.biases or (config.qkv_biases and path.endswith(("query", "key", "value")))


def _norms(config: TransformerConfig) -> dict[str, int]:
    """Features of each norm of a block that has a weight."""
    if config.norm == "plain_rms":
        return {}
    sizes = dict.fromkeys(("attention_norm", "mlp_norm"), config.embed)
    if config.qk_norm:
        sizes |= dict.fromkeys(("attention.query_norm", "attention.key_norm"), config.head_size)
    return sizes
