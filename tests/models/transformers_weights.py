"""Models of `transformers` with random weights, and the same weights as a `Transformer` of ours.

The names and layouts are those of `models.hf`; that they are right is what the comparisons show.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import models.named as hax
from models.hf.architectures import architecture_of, to_json
from models.hf.tensors import ArrayPart
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from training.sharding.layout import is_named


def randomized(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """`model` in float32 with random matrices and biases, norm weights about one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(normal * 0.25)
            elif name.endswith("bias"):
                parameter.copy_(normal * 0.3)
            else:
                parameter.copy_(1.0 + 0.3 * normal)
    return model.float().eval()


def random_model(config: TransformerConfig, positions: int) -> torch.nn.Module:
    """The model of `transformers` that computes what `config` does, with random weights."""
    content = json.loads(json.dumps(to_json(config, positions)))
    kind = type(transformers.AutoConfig.for_model(content["model_type"]))
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    made = kind.from_dict({**content, **special}, attn_implementation="eager")
    return randomized(getattr(transformers, content["architectures"][0])(made))


def ours(config: TransformerConfig, state: dict[str, np.ndarray]) -> Transformer:
    """A Transformer with the arrays of a state dict.

    Every parameter must be given, and nothing else.
    """
    rest = dict(state)
    if config.tied:
        rest.pop("lm_head.weight", None)
    arrays: dict[str, list[np.ndarray]] = {}
    for tensor in architecture_of(config).tensors(config):
        value = np.asarray(rest.pop(tensor.name), np.float32)
        assert value.shape == tensor.shape, tensor.name
        for part, array in zip(tensor.parts, tensor.split(value), strict=True):
            arrays.setdefault(part.path, []).append(array)
    assert not rest, f"nothing takes {sorted(rest)}"
    shapes = jax.eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))

    def fill(path: tuple, leaf: hax.NamedArray) -> hax.NamedArray:
        values = np.stack(arrays.pop(_name(path)))
        return hax.named(jnp.asarray(values.reshape(leaf.array.shape)), leaf.axes)

    made = jax.tree.map_with_path(fill, shapes, is_leaf=is_named)
    assert not arrays, f"nothing takes {sorted(arrays)}"
    return made


def state_of(model: Transformer) -> dict[str, np.ndarray]:
    """The state dict of a model of ours; a tied head is left out."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_named)
    arrays = {_name(path): np.asarray(leaf.array) for path, leaf in leaves}

    def value(part: ArrayPart) -> np.ndarray:
        array = arrays[part.path]
        return array if part.layer is None else array[part.layer]

    tensors = architecture_of(model.config).tensors(model.config)
    return {t.name: np.array(t.join([value(part) for part in t.parts])) for t in tensors}


def fill(theirs: torch.nn.Module, model: Transformer) -> None:
    """Give a model of `transformers` the parameters of `model`."""
    state = state_of(model)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.from_numpy(state.pop(name)))
    assert not state, f"nothing takes {sorted(state)}"


def _name(path: tuple) -> str:
    return ".".join(key.name for key in path)


def numpy_state(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays of a state dict, or of its gradients."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}
