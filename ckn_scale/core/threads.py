"""Compute threads are set on purpose: results and speed both depend on them."""

from __future__ import annotations

import os

import cv2
import torch

from ckn_scale.core.vector_index import import_faiss
from ckn_scale.errors import MissingDependency


def set_compute_threads(count: int) -> None:
    """Give torch, OpenCV and FAISS `count` threads each in this process."""
    torch.set_num_threads(count)
    cv2.setNumThreads(count)
    import_faiss().omp_set_num_threads(count)


def require_device(device: str) -> None:
    """`cuda` never falls back silently."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingDependency(
            "numerics.device is cuda, but torch sees no GPU in this process "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}); install a CUDA build of "
            "torch, give the worker a GPU, or plan another run with --device cpu"
        )
