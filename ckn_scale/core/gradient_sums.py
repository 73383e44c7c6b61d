"""Sums of gradients over the pieces of a batch, in one order whoever has which pieces.

Pieces are the leaves of a binary tree. Whoever has some adds up the subtrees that are whole, so that little
more than one sum travels from each worker, and each sum of floats has the same two terms everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np


class PartialSum(NamedTuple):
    """The sum over a subtree: `size` pieces, a power of two, from `start`, a multiple of it."""

    start: int
    size: int
    arrays: list[np.ndarray]


def merge_sums(sums: Iterable[PartialSum]) -> list[PartialSum]:
    """Neighbours, in their order, added up as far as the tree goes."""
    merged: list[PartialSum] = []
    for one in sums:
        merged.append(one)
        while len(merged) > 1 and _are_siblings(*merged[-2:]):
            right, left = merged.pop(), merged.pop()
            merged.append(PartialSum(left.start, 2 * left.size, _add(left.arrays, right.arrays)))
    return merged


def finish_sum(sums: Iterable[PartialSum]) -> list[np.ndarray]:
    """Of all pieces; what is left over when their number is no power of two is added from the first on."""
    return reduce(_add, [one.arrays for one in merge_sums(sums)])


def _are_siblings(left: PartialSum, right: PartialSum) -> bool:
    return left.size == right.size and left.start % (2 * left.size) == 0


def _add(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
    return [one + other for one, other in zip(left, right, strict=True)]
