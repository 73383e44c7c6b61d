"""`make chaos`: random kills of actors, nodes and drivers while runs go from nothing to a published index.

Each round indexes the same images on a Ray cluster of three nodes. Kills fall at random moments while
shards are in flight; a node that was killed comes back, a driver that ended is started again. A round
ends when a driver ends well; then its digests must equal those of a run that nobody disturbed, and
every planned image must have one row. The last line is the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from photo_runs import OVERRIDES, assert_conserved, digests_of, index_command, tiny_options
from ray_nodes import RayNodes, send_signal

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import PHOTOS, read_photo
from ckn_scale.pipeline import index_images
from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.storage.run_folder import RunFolder

NODES = 3
WEIGHTS = {"actor": 6, "node": 2, "driver": 2}
RETRIED = ("lost", "node_lost", "failed", "overdue")
DRIVERS_PER_ROUND = 60  # a run that never ends is a bug too


def render_images(folder: Path, count: int) -> None:
    """`count` small views of the demo's photographs."""
    folder.mkdir()
    names = [(photo, view) for view in VIEWS for photo in PHOTOS]
    for i in range(count):
        photo, view = names[i % len(names)]
        pixels = render_view(read_photo(photo), view, seed=i)
        (folder / f"{photo}-{view}-{i:04d}.jpg").write_bytes(encode_jpeg(pixels, 88))


class Round:
    """One run, from its first driver to the one that ends well."""

    def __init__(self, cluster: RayNodes, images: Path, run: Path, log: Path) -> None:
        self.cluster, self.images, self.run, self.log = cluster, images, run, log
        self.drivers = 0
        self.kills: Counter[str] = Counter()
        self.driver = self._start_driver()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        self.drivers += 1
        if self.drivers > DRIVERS_PER_ROUND:
            said = self.log.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self.run} does not end; its drivers said last:\n{said}")
        command = index_command("index", self.images, self.run, *tiny_options(), "--accept")
        command += ["--workers", str(NODES), "--ray", "auto"]
        with open(self.log, "ab") as log:
            return subprocess.Popen(command, env=self.cluster.driver_env, stdout=log, stderr=log)

    def go_on(self) -> bool:
        """Whether the round is still under way; a driver that ended badly is started again."""
        code = self.driver.poll()
        if code is not None and code != 0:
            self.driver = self._start_driver()
        return code != 0

    def strike(self, dice: random.Random) -> str | None:
        """Kill something, if a shard is in flight; what it was."""
        working = list(self._working_actors())
        if not working:
            return None
        kind = dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        if kind == "actor":
            send_signal(dice.choice(working), signal.SIGKILL)
        elif kind == "node":
            self.cluster.kill_node(dice.choice(self.cluster.nodes[1:]))
            self.cluster.add_node()
        else:
            self.driver.kill()
            self.driver.wait()
        self.kills[kind] += 1
        return kind

    def _working_actors(self) -> Iterator[int]:
        """Ray writes into a worker's title what it is doing."""
        for node in self.cluster.nodes:
            for pid in self.cluster.list_workers(node):
                try:
                    title = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if title.startswith(b"ray::ShardActor.process"):
                    yield pid


def make_chaos(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dice = random.Random(options.seed)
    images = folder / "images"
    render_images(images, options.images)
    print(f"{options.images} images; the run that nobody disturbs …", flush=True)
    calm = folder / "calm"
    settings = load_settings("tiny", None, OVERRIDES)
    index_images(str(images), str(calm), settings, Resources(workers=2), accept=True)
    wanted = digests_of(calm)
    figures: Counter[str] = Counter()
    begun = time.monotonic()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kit = os.pathsep.join(filter(None, [str(Path(__file__).parent), env.get("PYTHONPATH")]))
    env |= {"HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": kit}
    with RayNodes(env, NODES) as cluster:
        while figures["kills"] < options.kills and time.monotonic() - begun < 60 * options.minutes:
            figures["rounds"] += 1
            run = folder / f"run-{figures['rounds']}"
            one = Round(cluster, images, run, folder / f"run-{figures['rounds']}.log")
            _disturb(one, options, dice, options.kills - figures["kills"], begun)
            _check(one, wanted, figures)
            print(_describe(one, figures), flush=True)
    figures["seconds"] = round(time.monotonic() - begun)
    return {"seed": options.seed, "images": options.images, **figures}


def _disturb(one: Round, options: argparse.Namespace, dice: random.Random, budget: int, begun: float) -> None:
    next_strike = time.monotonic() + dice.expovariate(1 / options.every_s)
    while one.go_on():
        now = time.monotonic()
        allowed = one.kills.total() < budget and now - begun < 60 * options.minutes
        if allowed and now >= next_strike and one.strike(dice) is not None:
            next_strike = time.monotonic() + dice.expovariate(1 / options.every_s)
        time.sleep(0.02)


def _check(one: Round, wanted: dict[str, str], figures: Counter[str]) -> None:
    found = digests_of(one.run)
    if found != wanted:
        raise SystemExit(f"{one.run}: digests differ: {found} instead of {wanted}")
    assert_conserved(one.run)
    run = RunFolder.open(str(one.run))
    events = Counter(event["kind"] for event in run.events.read_all())
    figures["kills"] += one.kills.total()
    for kind in WEIGHTS:
        figures[f"kills_{kind}"] += one.kills[kind]
    figures["drivers"] += one.drivers
    figures["shards_tried_again"] += sum(events[kind] for kind in RETRIED)
    figures["versions"] += len(run.versions.numbers())
    figures["orphan_files"] += len(find_garbage(run, grace_s=0))


def _describe(one: Round, figures: Counter[str]) -> str:
    kills = ", ".join(f"{count} {kind}s" for kind, count in sorted(one.kills.items())) or "nothing"
    return (
        f"round {figures['rounds']}: killed {kills}; {one.drivers} drivers; digests equal, images conserved"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--images", type=int, default=160, help="per round")
    parser.add_argument("--every-s", type=float, default=2.0, help="mean time between kills")
    parser.add_argument("--minutes", type=float, default=60.0, help="no kills after that")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--folder", type=Path, help="kept; a temporary one otherwise")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    if options.folder is not None:
        options.folder.mkdir(parents=True)
        figures = make_chaos(options, options.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="ckn-chaos-") as folder:
            figures = make_chaos(options, Path(folder))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
