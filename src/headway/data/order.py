"""The order of samples: a pure function of (seed, epoch, index).

Owns: the keyed permutation of an epoch, and the random generator of one sample.
Does not own: who asks for which positions (loader) nor what a sample is (datasets).

The permutation is a Feistel network over just enough bits for the dataset, with cycle walking to
stay inside it. Nothing is stored, so any position of any epoch costs the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError

IndexArray = npt.NDArray[np.int64]

MAX_SAMPLES = 2**60
_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_A = 0xFF51AFD7ED558CCD
_MULTIPLIER_B = 0xC4CEB9FE1A85EC53
_NUM_ROUNDS = 8


def mix64(value: int) -> int:
    """Scramble 64 bits so that every input bit reaches every output bit."""
    value &= _MASK64
    value ^= value >> 33
    value = (value * _MULTIPLIER_A) & _MASK64
    value ^= value >> 33
    value = (value * _MULTIPLIER_B) & _MASK64
    return value ^ (value >> 33)


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers; the order of the parts matters."""
    key = _GOLDEN
    for part in parts:
        key = mix64((key + _GOLDEN) ^ mix64(part + _GOLDEN))
        # Integers beyond 64 bits must not fold onto smaller ones.
        if not -(2**63) <= part <= _MASK64:
            key = mix64(key ^ (part >> 64))
    return key


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random generator that belongs to one sample of one epoch."""
    key = np.array([derive_key(seed, epoch), index & _MASK64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


class SampleOrder:
    """Which sample stands at which position of an epoch, without storing a permutation."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ConfigError(f"num_samples must be from 1 to 2**60, got {num_samples}")
        self.num_samples = int(num_samples)
        self.seed = int(seed)
        self.shuffle = bool(shuffle)
        num_bits = max(1, (self.num_samples - 1).bit_length())
        self._right_bits = (num_bits + 1) // 2
        self._left_bits = num_bits - self._right_bits
        self._keys: tuple[int, tuple[int, ...]] = (-1, ())

    def indices(self, epoch: int, start: int, count: int) -> IndexArray:
        """The samples at positions start .. start + count - 1 of the epoch."""
        if start < 0 or count < 0 or start + count > self.num_samples:
            raise IndexError(
                f"positions {start}..{start + count} are outside 0..{self.num_samples}"
            )
        return self.at(epoch, np.arange(start, start + count, dtype=np.int64))

    def at(self, epoch: int, positions: IndexArray) -> IndexArray:
        """The samples at the given positions of the epoch."""
        if not self.shuffle or self.num_samples == 1 or len(positions) == 0:
            return positions
        keys = [np.uint64(key) for key in self._round_keys(epoch)]
        limit = np.uint64(self.num_samples)
        values = self._permute(positions.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= limit)
        while len(outside):
            walked = self._permute(values[outside], keys)
            values[outside] = walked
            outside = outside[walked >= limit]
        return values.astype(np.int64)

    def index(self, epoch: int, position: int) -> int:
        """The sample at one position: the same as `indices`, faster for a single one."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is outside 0..{self.num_samples}")
        if not self.shuffle or self.num_samples == 1:
            return position
        keys = self._round_keys(epoch)
        value = self._permute_one(position, keys)
        while value >= self.num_samples:
            value = self._permute_one(value, keys)
        return value

    def _round_keys(self, epoch: int) -> tuple[int, ...]:
        cached_epoch, keys = self._keys
        if cached_epoch != epoch or not keys:
            keys = tuple(derive_key(self.seed, epoch, number) for number in range(_NUM_ROUNDS))
            self._keys = (epoch, keys)
        return keys

    def _permute(
        self, values: npt.NDArray[np.uint64], keys: list[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        right_bits = np.uint64(self._right_bits)
        left_mask = np.uint64((1 << self._left_bits) - 1)
        right_mask = np.uint64((1 << self._right_bits) - 1)
        left, right = values >> right_bits, values & right_mask
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left ^= _mix_array(right, key) & left_mask
            else:
                right ^= _mix_array(left, key) & right_mask
        return (left << right_bits) | right

    def _permute_one(self, value: int, keys: tuple[int, ...]) -> int:
        left_mask = (1 << self._left_bits) - 1
        right_mask = (1 << self._right_bits) - 1
        left, right = value >> self._right_bits, value & right_mask
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left ^= mix64(right + key) & left_mask
            else:
                right ^= mix64(left + key) & right_mask
        return (left << self._right_bits) | right


def _mix_array(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    shift = np.uint64(33)
    mixed = values + key
    mixed ^= mixed >> shift
    mixed *= np.uint64(_MULTIPLIER_A)
    mixed ^= mixed >> shift
    mixed *= np.uint64(_MULTIPLIER_B)
    mixed ^= mixed >> shift
    return mixed
