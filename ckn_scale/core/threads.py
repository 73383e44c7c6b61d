"""Compute threads are set on purpose: results and speed both depend on them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import torch

from ckn_scale.core.vector_index import faiss_threads, import_faiss
from ckn_scale.errors import MissingDependency

_computing = threading.RLock()


def set_compute_threads(count: int) -> None:
    """Give torch, OpenCV and FAISS `count` threads each in this process, for good."""
    torch.set_num_threads(count)
    cv2.setNumThreads(count)
    import_faiss().omp_set_num_threads(count)


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Give them `count` threads for what is called inside, and what they had before afterwards.

    The numbers belong to the process, so one thread is inside at a time: in a program that has other
    things to compute, these have `count` threads meanwhile, too.
    """
    with _computing, faiss_threads(count):
        torch_before, cv2_before = torch.get_num_threads(), cv2.getNumThreads()
        torch.set_num_threads(count)
        cv2.setNumThreads(count)
        try:
            yield
        finally:
            torch.set_num_threads(torch_before)
            cv2.setNumThreads(cv2_before)


def require_device(device: str) -> None:
    """`cuda` never falls back silently."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingDependency(
            "numerics.device is cuda, but torch sees no GPU in this process "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}); install a CUDA build of "
            "torch, give the worker a GPU, or plan another run with --device cpu"
        )
