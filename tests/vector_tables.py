"""Rows of the stage `vectors`, without a run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ckn_scale import schemas

DIM = 8


def make_vectors(num_rows: int = 20) -> pa.Table:
    """Every third image has no vector."""
    rng = np.random.default_rng(0)
    ok = [i % 3 != 0 for i in range(num_rows)]
    rows = {
        "image_id": range(num_rows),
        "state": ["ok" if good else "corrupt" for good in ok],
        "reason": ["" if good else "Müll" for good in ok],
        "width_px": [640 if good else None for good in ok],
        "height_px": [480 if good else None for good in ok],
        "original_width_px": [1280 if good else None for good in ok],
        "original_height_px": [960 if good else None for good in ok],
        "vector": [rng.standard_normal(DIM).astype(np.float16).tobytes() if good else None for good in ok],
    }
    return pa.table(rows, schema=schemas.vectors_schema("float16", DIM, 2 * DIM))
