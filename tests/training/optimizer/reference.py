"""The updates of a small model of every role, written out in NumPy float64."""

from __future__ import annotations

import math

import numpy as np

from training.config import OptimizerConfig

LAYERS = 2
AXES = {
    "embedding": ("vocab", "embed"),
    "value_embedding": ("vocab", "mlp"),
    "head": ("vocab", "embed"),
    "norm": ("embed",),
    "residual_scale": ("layers",),
    "input_scale": ("layers",),
    "up": ("layers", "embed", "mlp"),
    "query": ("layers", "embed", "kv_heads", "head_size"),
    "key": ("layers", "embed", "head_size"),
    "output": ("layers", "kv_heads", "head_size", "embed"),
}
SIZES = {"layers": LAYERS, "embed": 8, "mlp": 12, "vocab": 8, "kv_heads": 2, "head_size": 4}
INPUTS = {"up": 1, "query": 1, "key": 1, "output": 2}  # number of a matrix's input axes
ROLE_OF = {name: "matrices" for name in INPUTS} | {"norm": "vectors"}
DECAYS = {"head", *INPUTS}  # without a group that says otherwise
POLAR_SAFETY, POLAR_CUSHION, POLAR_LEAST = 0.02, 0.02, 1e-3


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random float64 arrays of all parameters; a tenth of their elements are 0."""
    found = {}
    for name, axes in AXES.items():
        shape = [SIZES[axis] for axis in axes]
        found[name] = rng.normal(size=shape) * (rng.random(shape) > 0.1)
    return found


def best_quintic(low: float, high: float) -> np.ndarray:
    """The odd quintic that is nearest to 1 on [low, high], by Remez's exchange: a, b, c."""
    nodes = np.linspace(low, high, 4)
    for _ in range(60):
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        rows = np.stack([nodes, nodes**3, nodes**5, signs], axis=1)
        a, b, c, _ = np.linalg.solve(rows, np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)  # of the derivative, a quadratic in x^2
        inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
        nodes = np.array([low, *inner, high])
    return np.array([a, b, c])


def polar_express(steps: int) -> list[np.ndarray]:
    """Coefficients by algorithm 1 of arXiv:2505.16932, each for the range that is left."""
    found, low, high = [], POLAR_LEAST, 1.0
    for i in range(steps):
        # The cushion: small singular values rise no faster than those of this share of the largest.
        best = best_quintic(max(low, POLAR_CUSHION * high), high)
        ends = [best @ [x, x**3, x**5] for x in (low, high)]
        best = best * 2.0 / sum(ends)  # centred on 1 for the whole range
        if i < steps - 1:
            best = best / (1.0 + POLAR_SAFETY) ** np.array([1, 3, 5])
        low = best @ [low, low**3, low**5]
        high = 2.0 - low
        found.append(best)
    return found


def orthogonal(x: np.ndarray, config: OptimizerConfig) -> np.ndarray:
    """What the iteration makes of the singular values of a matrix, by its decomposition."""
    left, values, right = np.linalg.svd(x, full_matrices=False)
    if config.muon_iteration == "polar_express":
        each = polar_express(5)[: config.muon_steps]
        values = values / (1.01 * np.linalg.norm(x))
    else:
        each = [(3.4445, -4.7750, 2.0315)] * config.muon_steps
        values = values / np.linalg.norm(x)
    for a, b, c in each:
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def even(u: np.ndarray, squares: np.ndarray | None, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """nanochat's variance reduction of u [inputs, outputs], and the new mean squares.

    The longer side keeps a number for each of its rows, the outputs where both are equal.
    """
    axis = 0 if u.shape[1] >= u.shape[0] else 1
    mean = np.mean(u**2, axis=axis, keepdims=True)
    squares = (1.0 - beta) * mean + (0.0 if squares is None else beta * squares)
    scaled = u / np.sqrt(np.maximum(squares, 1e-10))
    return scaled * np.linalg.norm(u) / np.linalg.norm(scaled), squares


def momentum_of(config: OptimizerConfig, step: int, steps: int) -> float:
    """Muon's momentum at a step, by the lines between its three values."""
    beta = config.muon_momentum
    if config.muon_momentum_start is not None:
        share = min(step / config.muon_momentum_warmup, 1.0)
        beta = (1.0 - share) * config.muon_momentum_start + share * beta
    tail = config.phases(steps)[1]
    if config.muon_momentum_end is not None and step + 1 > steps - tail:
        share = (step + 1 - (steps - tail)) / tail
        beta = (1.0 - share) * beta + share * config.muon_momentum_end
    return beta


class Reference:
    """The state of all parameters of a run of `steps` steps."""

    def __init__(self, config: OptimizerConfig, steps: int) -> None:
        self.config, self.steps, self.count = config, steps, 0
        self.mean: dict[str, np.ndarray] = {}
        self.square: dict[str, np.ndarray] = {}
        self.rows: dict[tuple[str, int], np.ndarray] = {}

    def directions(
        self, gradients: dict[str, np.ndarray], parameters: dict[str, np.ndarray], step: int
    ) -> dict[str, np.ndarray]:
        """The directions of a step, of gradients that need no clipping."""
        self.count += 1
        return {
            name: self._direction(name, gradients[name], p, step) for name, p in parameters.items()
        }

    def _direction(self, name: str, g: np.ndarray, p: np.ndarray, step: int) -> np.ndarray:
        config, role = self.config, ROLE_OF.get(name, name)
        own, group = getattr(config, role), config.group(role)
        mean = self.mean.get(name, np.zeros_like(g))
        if group.kind == "adamw":
            square = self.square.get(name, np.zeros_like(g))
            mean = group.beta1 * mean + (1 - group.beta1) * g
            square = group.beta2 * square + (1 - group.beta2) * g**2
            self.square[name] = square
            unbiased = np.sqrt(square / (1 - group.beta2**self.count))
            found = mean / (1 - group.beta1**self.count) / (unbiased + group.epsilon)
        elif group.kind == "lion":
            found = np.sign(group.beta1 * mean + (1 - group.beta1) * g)
            mean = group.beta2 * mean + (1 - group.beta2) * g
        else:
            beta = momentum_of(config, step, self.steps)
            mean = beta * mean + (1 - beta) * g
            ahead = beta * mean + (1 - beta) * g if config.muon_nesterov else mean
            found = np.stack([self._layer(name, i, ahead[i]) for i in range(LAYERS)])
        self.mean[name] = mean
        decay, cautious = self._decay(name, role, step)
        agrees = (found * p >= 0.0) if cautious else np.ones_like(p)
        if own.weight_decay is None and name not in DECAYS:
            decay = 0.0
        return (found + decay * agrees * p) * group.learning_rate / config.learning_rate

    def _layer(self, name: str, layer: int, momentum: np.ndarray) -> np.ndarray:
        config, inputs = self.config, INPUTS[name]
        flat = momentum.reshape(math.prod(momentum.shape[:inputs]), -1)
        found = orthogonal(flat, config)
        fan_in, fan_out = flat.shape
        if config.muon_rms is None:
            found = found * math.sqrt(max(1.0, fan_out / fan_in))
        else:
            found = found * config.muon_rms * math.sqrt(max(fan_in, fan_out))
        if config.muon_row_beta is not None:
            before = self.rows.get((name, layer))
            found, self.rows[name, layer] = even(found, before, config.muon_row_beta)
        return found.reshape(momentum.shape)

    def _decay(self, name: str, role: str, step: int) -> tuple[float, bool]:
        config = self.config
        weight = config.group(role).weight_decay
        if getattr(config, role).weight_decay is not None and role != "matrices":
            return weight, False
        share = (step + 1) / self.steps
        left = {
            "constant": 1.0,
            "linear": 1.0 - share,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * share)),
        }[config.weight_decay_schedule]
        return weight * left, config.cautious_decay
