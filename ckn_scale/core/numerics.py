"""What results depend on besides code and data: compute threads, the device, the processor's arithmetic."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import cv2
import numpy as np
import torch

from ckn_scale.core.faiss_library import faiss_threads, import_faiss
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


@dataclass(frozen=True)
class Arithmetic:
    """Equal for processes whose results are equal to the last bit."""

    cpu: str  # torch's name of what it uses of the CPU: AVX2, AVX512, DEFAULT, …
    probe: str  # of the bits of a computation that goes through all libraries
    gpu: str = ""  # the device's name, where it is used

    def __str__(self) -> str:
        where = f"{self.cpu} and {self.gpu}" if self.gpu else self.cpu
        return f"{where} (probe {self.probe})"


@cache
def find_arithmetic(device: str) -> Arithmetic:
    """What this process computes with on `device` (cpu, cuda); measured once."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    return Arithmetic(torch.backends.cpu.get_cpu_capability(), _probe(), gpu)


def _probe() -> str:
    """The bits of products, sums, exponentials, a convolution and a filter, for inputs that are exact."""
    numbers = (np.arange(256 * 1024, dtype=np.uint64) * 2654435761) % 2**20
    values = (numbers.astype(np.float32) / 2**20 - 0.5).reshape(256, 1024)
    rows, images = torch.from_numpy(values.copy()), torch.from_numpy(values.copy()).reshape(16, 16, 32, 32)
    filters = torch.from_numpy(values[:32, :144].copy()).reshape(32, 16, 3, 3)
    results = [
        (rows @ rows.T).numpy(),
        torch.exp(rows).numpy(),
        rows.sum(dim=1).numpy(),
        torch.nn.functional.conv2d(images, filters).numpy(),
        values @ values.T,
        np.exp(values),
        cv2.GaussianBlur(values, (0, 0), 1.6),
    ]
    digest = hashlib.sha256()
    for result in results:
        digest.update(np.ascontiguousarray(result).tobytes())
    return digest.hexdigest()[:8]
