"""What an append costs, phase by phase, to a small and to a large collection.

    python benchmarks/append.py PHOTOS [--images 100 1000] [--new 3] [--preset tiny] [--set KEY=VALUE …]

PHOTOS is a folder. Of each number of images a run is made with an index shard for every four; then the
new ones are appended to it (one process, no workers) and the phases of that call are timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ckn_scale.config import Resources, Settings, load_settings
from ckn_scale.pipeline import index_images
from ckn_scale.runners.driver import Progress
from ckn_scale.storage.run_folder import RunFolder

SMALL_SHARDS = ("plan.images_per_shard=4", "index.shards_per_index_shard=1")
PHASES = {
    "encode_images": "encode",
    "build_index": "build",
    "plant_queries": "plant",
    "certify_index": "certify",
}
Times = dict[str, tuple[float, float]]


class PhaseClock:
    """Wall and CPU seconds of each phase. A phase ends where the driver begins the next step.

    So what the driver reads before a step (records, the plan) counts for the phase before it.
    """

    def __init__(self) -> None:
        self.times: Times = {}
        self._phase, self._since = "plan", _now()

    def __call__(self, progress: Progress) -> None:
        phase = PHASES[progress.step.split("-")[0]]
        if progress.done == progress.total:  # what comes after the last step is publishing
            phase = "publish" if phase == "certify" else phase
        self.switch(phase)

    def switch(self, phase: str) -> None:
        now, before = _now(), self.times.get(self._phase, (0.0, 0.0))
        self.times[self._phase] = (before[0] + now[0] - self._since[0], before[1] + now[1] - self._since[1])
        self._phase, self._since = phase, now


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def time_append(source: str, run: str, settings: Settings) -> tuple[Times, int]:
    """The times of each phase, and the index shards that queries were asked of."""
    clock = PhaseClock()
    report = index_images(
        source, run, settings, Resources(workers=0), append=True, accept=True, on_progress=clock
    )
    clock.switch("")
    return clock.times, next(step.total for step in report.steps if step.step.startswith("certify_index"))


def measure(known: Sequence[Path], new: Sequence[Path], settings: Settings, folder: Path) -> None:
    first, second, run = folder / "known.txt", folder / "new.txt", str(folder / "run")
    first.write_text("\n".join(map(str, known)))
    second.write_text("\n".join(map(str, new)))
    begun = time.perf_counter()
    index_images(str(first), run, settings, Resources(workers=0), accept=True)
    built_s = time.perf_counter() - begun
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        times, asked = pool.apply(time_append, (str(second), run, settings))
    shards = len(RunFolder.open(run).commits("build_index").committed())
    print(f"{len(known)} images ({built_s:.0f} s), {shards} index shards, {len(new)} appended: {asked} asked")
    for phase, (wall_s, cpu_s) in times.items():
        print(f"  {phase:<10}{wall_s:8.2f} s{cpu_s:8.2f} s of CPU")
    print(f"  {'all':<10}{sum(wall for wall, _ in times.values()):8.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--new", type=int, default=3)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    settings = load_settings(options.preset, None, [*SMALL_SHARDS, *options.overrides])
    found = sorted(path for path in options.photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    os.environ["OMP_NUM_THREADS"] = "1"
    for count in options.images:
        new = found[count : count + options.new]
        with tempfile.TemporaryDirectory(prefix="ckn-bench-") as folder:
            measure(found[:count], new, settings, Path(folder))


if __name__ == "__main__":
    main()
