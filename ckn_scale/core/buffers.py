"""Arrays that are reused from image to image, one set per thread.

A fresh array of some megabytes costs more in page faults than the filters take to fill it.
"""

from __future__ import annotations

import math
import threading

import numpy as np


class Buffers(threading.local):
    """`take` hands out uninitialised arrays; the next `take` of the same name reuses the memory.

    So nothing that outlives the call it was taken for may be a view of one.
    """

    def __init__(self) -> None:
        self._flat: dict[str, np.ndarray] = {}

    def take(self, name: str, *shape: int, dtype: type = np.float32) -> np.ndarray:
        """An array of `shape` under `name`; a name always goes with the same dtype."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            flat = self._flat[name] = np.empty(size, dtype)
        return flat[:size].reshape(shape)
