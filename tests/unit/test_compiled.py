"""Loops are compiled wherever they run, and bits are counted as numpy counts them."""

from __future__ import annotations

import numba
import numpy as np

from ckn_scale.core import compiled
from ckn_scale.core.compiled import compile_loop, count_bits


def count_all(words):
    total = 0
    for word in words:
        total += np.int64(count_bits(word))
    return total


def test_count_bits_counts_as_numpy_does():
    words = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    words[:2] = 0, 2**64 - 1
    assert compile_loop(count_all)(words) == np.bitwise_count(words).sum()


def test_compile_loop_works_where_nothing_can_be_kept(monkeypatch):
    def refuse_cache(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(compiled, "njit", refuse_cache)
    assert compile_loop(count_all)(np.array([7, 8], np.uint64)) == 4
