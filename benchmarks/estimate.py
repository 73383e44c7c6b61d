"""What `plan` predicts, against what the run then takes: time per phase, bytes, peak memory.

    python benchmarks/estimate.py PHOTOS [--images 200] [--preset compact] [--set KEY=VALUE …] [--json FILE]

PHOTOS is a folder; the images are drawn from it evenly. Both the rehearsal and the run (one process, no
workers) count CPU seconds, so that a busy machine does not matter. Wanted: each ratio within 0.75 … 1.25.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from ckn_scale.config import Resources, Settings, load_settings
from ckn_scale.pipeline import index_images
from ckn_scale.runners.driver import Progress
from ckn_scale.runs.estimate import Estimate, estimate_run
from ckn_scale.steps.plan_images import plan_images

PHASES = {
    "encode_images": "encoding",
    "build_index": "building",
    "plant_queries": "certifying",
    "certify_index": "certifying",
}


class PhaseClock:
    """CPU seconds of each phase, by the driver's own progress."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._step, self._since = "", cpu_s()

    def __call__(self, progress: Progress) -> None:
        self.stop()
        self._step = progress.step.split("-")[0]

    def stop(self) -> None:
        now = cpu_s()
        if self._step:  # before the first step there is only what every process begins with
            self.seconds[phase_of(self._step)] += now - self._since  # type: ignore[assignment]
        self._since = now


def phase_of(step: str) -> str:
    return PHASES.get(step, "learning")


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def predict(estimate: Estimate) -> dict[str, float]:
    phases: Counter[str] = Counter()
    for step, cost in estimate.steps.items():
        phases[phase_of(step)] += cost.seconds  # type: ignore[assignment]
    return {
        **{f"{phase}, s": seconds for phase, seconds in phases.items()},
        "all, s": estimate.seconds,
        "samples, MB": estimate.sample_bytes / 1e6,
        "kept, MB": estimate.kept_bytes / 1e6,
        "peak memory, MB": max(estimate.worker_memory_mb, estimate.reduction_memory_mb),
    }


def run_here(source: str, run: str, settings: Settings) -> dict[str, float]:
    clock = PhaseClock()
    index_images(
        source, run, settings, Resources(workers=0), accept=True, keep_samples=True, on_progress=clock
    )
    clock.stop()
    sizes = {path: path.stat().st_size for path in Path(run).rglob("*") if path.is_file()}
    samples = sum(size for path, size in sizes.items() if path.relative_to(run).parts[0] == "samples")
    return {
        **{f"{phase}, s": seconds for phase, seconds in clock.seconds.items()},
        "all, s": float(sum(clock.seconds.values())),
        "samples, MB": samples / 1e6,
        "kept, MB": (sum(sizes.values()) - samples) / 1e6,
        "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def compare(photos: Path, count: int, settings: Settings, folder: Path) -> list[dict[str, Any]]:
    found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    chosen = found[:: max(1, len(found) // count)][:count]
    source, run = folder / "photos.txt", str(folder / "run")
    source.write_text("\n".join(map(str, chosen)))
    predicted = predict(estimate_run(plan_images(run, settings, str(source)), settings))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        actual = pool.apply(run_here, (str(source), run, settings))
    return [{"quantity": name, "predicted": predicted[name], "actual": actual[name]} for name in predicted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = load_settings(options.preset, None, options.overrides)
    with tempfile.TemporaryDirectory(prefix="ckn-bench-") as folder:
        rows = compare(options.photos, options.images, settings, Path(folder))
    for row in rows:
        ratio = row["predicted"] / row["actual"] if row["actual"] else 1.0
        print(
            f"{row['quantity']:<18}{row['predicted']:10.1f} predicted{row['actual']:10.1f} actual{ratio:8.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
