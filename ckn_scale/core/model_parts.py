"""What one model is made of: arrays, and what they mean as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class ModelPart(NamedTuple):
    """One of the models of an encoder: `ckn-grad`, `projection-grad`, `codebook-grad`, `reduction`, …"""

    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, Any]
