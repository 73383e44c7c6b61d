"""Descriptors of patches, all behind one protocol."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class PatchDescriptor(Protocol):
    """Anything that turns patches into rows; the rows of blank patches are zero."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def describe(self, patches: np.ndarray) -> np.ndarray:
        """uint8 (N, S, S, 3) → float32 (N, dim)."""
        ...
