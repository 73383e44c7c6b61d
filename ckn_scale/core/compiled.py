"""Loops over points and matches as machine code, by numba.

Whoever matches imports this when he does, not before: numba takes half a second. Nothing here is reassociated
or fused, so that sums have the same bits on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit, types
from numba.extending import intrinsic

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compile_loop(function: Loop) -> Loop:
    """Compiled at its first call and kept beside the source or in the user's cache, if one can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Loop = njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place to keep it: each process compiles anew
        compiled = njit(**options)(function)
    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def count_bits(context: Any, value: Any) -> Any:
    """The ones of a uint64; numba has no `numpy.bitwise_count`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate
