"""A pseudo-random bijection of [0, size) that is computed, never stored.

A generalised Feistel network on [0, a) x [0, b), a * b >= size, with a and b near the square root
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): each round adds a keyed hash of
one half to the other, modulo a or b. An output outside [0, size) is permuted again until it is
inside ("cycle walking"), which keeps the map a bijection; a * b < size + a, so this is rare.

The hash is the finaliser of SplitMix64: its right shifts carry high bits down to low ones; without
them every batch of a shuffled data set would be all even or all odd.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

# Large permutations fail the tests of randomness with 2 to 4 rounds and pass with 5 and 6. Small
# halves mix less per round: over keys, the 120 permutations of 5 elements are not quite uniformly
# distributed with 8 rounds but are with 16; from 24 elements on, 8 rounds are enough.
_ROUNDS = 8
_SMALL_SIZE, _ROUNDS_OF_SMALL = 32, 24
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIXING = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key derived from a tuple such as (seed, epoch, "window", 3), whose order matters."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


class FeistelPermutation:
    """A bijection of [0, size), chosen by `key`."""

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"size={size}: expected 1 to 2^62")
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        # Round keys are SplitMix64's outputs from the state `key`.
        rounds = _ROUNDS_OF_SMALL if size <= _SMALL_SIZE else _ROUNDS
        states = [(key + (index + 1) * _GOLDEN) & _MASK for index in range(rounds)]
        self._keys = np.array(states, np.uint64)
        _mix(self._keys, np.empty_like(self._keys))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The image of each position (int64, same shape)."""
        return self._walk(positions, backwards=False)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """The position whose image is each value (int64, same shape)."""
        return self._walk(values, backwards=True)

    def _walk(self, values: np.ndarray, *, backwards: bool) -> np.ndarray:
        values = np.asarray(values)
        if values.size and not (values.min() >= 0 and values.max() < self.size):
            raise IndexError(f"expected positions in [0, {self.size})")
        result = self._rounds(values.astype(np.uint64).reshape(-1), backwards=backwards)
        outside = np.flatnonzero(result >= self.size)
        while len(outside):
            result[outside] = self._rounds(result[outside], backwards=backwards)
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64).reshape(values.shape)

    def _rounds(self, values: np.ndarray, *, backwards: bool) -> np.ndarray:
        """All rounds in place: each adds to one half a keyed hash of the other, or subtracts it."""
        left, right = np.divmod(values, np.uint64(self._right))
        halves, sizes = [left, right], (np.uint64(self._left), np.uint64(self._right))
        hashed, scratch = np.empty_like(left), np.empty_like(left)
        rounds = range(len(self._keys))
        for index in reversed(rounds) if backwards else rounds:
            half, other, size = halves[index % 2], halves[1 - index % 2], sizes[index % 2]
            np.bitwise_xor(other, self._keys[index], out=hashed)
            _mix(hashed, scratch)
            # Division by a scalar is vectorised in numpy, the remainder is not.
            np.floor_divide(hashed, size, out=scratch)
            np.multiply(scratch, size, out=scratch)
            np.subtract(hashed, scratch, out=hashed)
            if backwards:  # half + (size - hashed), so that unsigned values stay positive
                np.subtract(size, hashed, out=hashed)
            np.add(half, hashed, out=half)
            # Below `size` the unsigned difference wraps around to a huge number: the minimum
            # keeps the half. Otherwise it is the difference.
            np.subtract(half, size, out=scratch)
            np.minimum(half, scratch, out=half)
        return left * sizes[1] + right


def _mix(values: np.ndarray, scratch: np.ndarray) -> None:
    """SplitMix64's finaliser (Steele et al. 2014; constants of Stafford's variant 13), in place."""
    for shift, factor in _MIXING:
        np.right_shift(values, shift, out=scratch)
        np.bitwise_xor(values, scratch, out=values)
        if factor is not None:
            np.multiply(values, factor, out=values)
