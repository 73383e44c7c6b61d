"""Seconds and peak memory of a plan over one and ten million URIs.

    python benchmarks/plan.py [--millions 1 10] [--json FILE]

The URIs are synthetic, in random order, in a text list; nothing reads the images. Each plan is made in a
process of its own, whose peak resident memory is reported. A bounded plan has a ratio near one.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ckn_scale.config import load_settings
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.plans import read_segments

STRIDE = 7_368_787  # a prime: i × STRIDE modulo the count is a shuffle of 0 … count - 1


def write_list(path: Path, count: int) -> None:
    with open(path, "w") as file:
        for i in range(count):
            number = i * STRIDE % count
            file.write(
                f"s3://photos/part-{number % 1000:03d}/{number:012d}-{number * 2654435761 % 2**32:08x}.jpg\n"
            )


def measure_here(source: str, run: str) -> dict[str, Any]:
    begun = time.perf_counter()
    made = plan_images(run, load_settings("compact"), source)
    seconds = time.perf_counter() - begun
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    segment = read_segments(made)[0]
    return {"images": segment.num_images, "seconds": seconds, "peak_mb": peak_mb}


def measure_apart(folder: Path, millions: float) -> dict[str, Any]:
    source, run = folder / f"{millions:g}.txt", folder / f"run-{millions:g}"
    write_list(source, int(millions * 1e6))
    command = [sys.executable, __file__, "--here", str(source), str(run)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    source.unlink()
    size_mb = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6
    return {**json.loads(result.stdout), "plan_mb": size_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", nargs=2, metavar=("LIST", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        print(json.dumps(measure_here(*options.here)))
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="ckn-bench-") as folder:
        for millions in options.millions:
            results.append(measure_apart(Path(folder), millions))
            one = results[-1]
            print(
                f"{one['images']:>12,} URIs  {one['seconds']:8.1f} s  {one['peak_mb']:8.0f} MB peak  "
                f"{one['plan_mb']:8.1f} MB written",
                flush=True,
            )
    print(f"peak memory ratio {results[-1]['peak_mb'] / results[0]['peak_mb']:.2f}   (wanted: at most 1.5)")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
