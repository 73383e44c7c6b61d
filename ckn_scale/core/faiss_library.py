"""FAISS, and how many threads it has; without torch, which `numerics.py` needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckn_scale.errors import MissingDependency


def import_faiss() -> Any:
    """The faiss module, or one sentence saying what to install."""
    try:
        import faiss
    except ImportError as error:
        message = "faiss is missing: pip install 'ckn-scale[cpu]' (or [gpu] on a machine with GPUs)"
        raise MissingDependency(message) from error
    return faiss


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """FAISS has `count` threads for what this thread calls inside, and what it had before afterwards."""
    faiss = import_faiss()
    before = faiss.omp_get_max_threads()  # OpenMP keeps this number per calling thread
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
