"""Samples chosen by hash: the same rows for any sharding, order or number of workers."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of uint64 that scatters neighbouring values."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def hash_priorities(seed: int, *keys: np.ndarray) -> np.ndarray:
    """A uint64 for each row of integer `keys` (broadcast together); the same on every machine.

    Rows with the smallest priorities are a uniform sample. Integers are taken modulo 2⁶⁴.
    """
    if not keys:
        raise ValueError("hash_priorities needs at least one array of keys, got none")
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    for key in keys:
        key = np.atleast_1d(key)
        if key.dtype.kind not in "iu":
            raise TypeError(f"keys must be integers, got {key.dtype}")
        state = _mix((state ^ _mix(key.astype(np.uint64) + _GOLDEN)) + _GOLDEN)
    return state.reshape(np.broadcast_shapes(*(np.shape(key) for key in keys)))


def smallest(priorities: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k smallest of (N,) numbers, ordered by (number, index); all of them if k is larger."""
    if k < 0:
        raise ValueError(f"k must be ≥ 0, got {k}")
    chosen = np.arange(len(priorities))
    if 0 < k < len(priorities):
        # Only the value at the cut is taken from `partition`: the order of its ties is not defined.
        chosen = np.flatnonzero(priorities <= np.partition(priorities, k - 1)[k - 1])
    return chosen[np.argsort(priorities[chosen], kind="stable")][:k]
