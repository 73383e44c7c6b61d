"""Seconds and peak memory of the vector's fit, on made-up VLADs read block by block.

    python benchmarks/fit.py [--images 4096] [--numbers 32768]

One thread. Blocks of columns are made when they are asked for, as `train_reduction` reads them from the
run; making them is a few seconds of the time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import resource
import time
from collections.abc import Sequence

import numpy as np

from ckn_scale.core.flattening import learn_flattening
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.pca import COLUMNS_PER_BLOCK

COMMON, ROWS_AT_ONCE = 64, 1000


class MadeUpVlads(Sequence[np.ndarray]):
    """Blocks (N, d) float16: some directions that all images share, the rest noise."""

    def __init__(self, num_images: int, numbers: int) -> None:
        rng = np.random.default_rng(0)
        strength = np.arange(1, COMMON + 1, dtype=np.float32)[:, None] ** -0.5
        self.directions = 0.5 * strength * rng.standard_normal((COMMON, numbers), dtype=np.float32)
        self.shares = rng.standard_normal((num_images, COMMON), dtype=np.float32)

    def __len__(self) -> int:
        return -(-self.directions.shape[1] // COLUMNS_PER_BLOCK)

    def __getitem__(self, position: int) -> np.ndarray:  # type: ignore[override]
        if position >= len(self):
            raise IndexError(position)
        rng = np.random.default_rng(position + 1)
        directions = self.directions[:, position * COLUMNS_PER_BLOCK :][:, :COLUMNS_PER_BLOCK]
        block = np.empty((len(self.shares), directions.shape[1]), np.float16)
        for start in range(0, len(block), ROWS_AT_ONCE):
            rows = self.shares[start : start + ROWS_AT_ONCE] @ directions
            rows += rng.standard_normal(rows.shape, dtype=np.float32)
            block[start : start + ROWS_AT_ONCE] = rows / 200
        return block


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--numbers", type=int, default=32_768)
    arguments = parser.parse_args()
    set_compute_threads(1)
    vlads = MadeUpVlads(arguments.images, arguments.numbers)
    begun = time.process_time()
    fitted = learn_flattening(vlads, background=False, min_images=2)
    seconds = time.process_time() - begun
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{arguments.images:,} × {arguments.numbers:,}: {len(fitted.factors)} directions,", end=" ")
    print(f"{seconds:.0f} s of CPU, peak {peak_gb:.2f} GB")


if __name__ == "__main__":
    main()
