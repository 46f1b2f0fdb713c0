"""A random-looking bijection of [0, size) that is computed, never stored.

A generalised Feistel network on [0, a) x [0, b), a * b >= size, with a and b near the square root
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): each round adds a keyed hash of
one half to the other, modulo a or b. Outputs outside [0, size) are sent round again
("cycle walking"), which keeps the map a bijection; a * b < size + a, so that is rare.

The hash must carry high bits down to low ones, which multiplication, addition and exclusive or
alone never do: without right shifts the parity of an output depends on parities only, and every
batch of a shuffled data set is all even or all odd. Hence the finaliser of SplitMix64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def derive_key(*parts: int | str) -> int:
    """A key of 64 bits from a tuple such as (seed, epoch, "window", 3); order and place count."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


class FeistelPermutation:
    """A bijection of [0, size), chosen by `key`.

    Args:
        size: 1 to 2^62.
        key: any integer; its low 64 bits count.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"size={size}: expected 1 to 2^62")
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        # SplitMix64's own sequence: round keys are its outputs from the state `key`.
        states = [(key + (index + 1) * _GOLDEN) & _MASK for index in range(_ROUNDS)]
        self._keys = _mix(np.array(states, np.uint64))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where each position goes (int64, same shape)."""
        return self._walk(positions, self._forward)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """The position that goes to each value (int64, same shape)."""
        return self._walk(values, self._backward)

    def _walk(self, values: np.ndarray, step: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        values = np.asarray(values)
        if values.size and not (values.min() >= 0 and values.max() < self.size):
            raise IndexError(f"expected positions in [0, {self.size})")
        result = step(values.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(result >= self.size)
        while len(outside):
            result[outside] = step(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64).reshape(values.shape)

    def _forward(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, np.uint64(self._right))
        for index, key in enumerate(self._keys):
            if index % 2:
                right = (right + self._round(left, key, self._right)) % np.uint64(self._right)
            else:
                left = (left + self._round(right, key, self._left)) % np.uint64(self._left)
        return left * np.uint64(self._right) + right

    def _backward(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, np.uint64(self._right))
        for index, key in reversed(list(enumerate(self._keys))):
            if index % 2:
                shift = np.uint64(self._right) - self._round(left, key, self._right)
                right = (right + shift) % np.uint64(self._right)
            else:
                shift = np.uint64(self._left) - self._round(right, key, self._left)
                left = (left + shift) % np.uint64(self._left)
        return left * np.uint64(self._right) + right

    @staticmethod
    def _round(half: np.ndarray, key: np.uint64, modulus: int) -> np.ndarray:
        return _mix(half ^ key) % np.uint64(modulus)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014; constants of Stafford's variant 13)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
