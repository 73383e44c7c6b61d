"""`make soak`: a server asked without a pause while its run changes and its replicas are killed.

Clients search by `ckn_scale.Client` all the time; meanwhile images are appended and deleted, versions
published and rolled back, garbage is collected, and replicas of shard groups, encoder and ingress are killed.
In the end every answer must be the one that its version gives in this process, no call may have failed but
for 429, and the server's memory must have stopped growing. The last line is the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from photo_runs import index_command
from running_server import (
    KEY,
    RunningServer,
    list_descendants,
    query_view,
    start_server,
    stop_server,
    wait_for,
)

from ckn_scale.client import Answer, Client, Retries
from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo
from ckn_scale.errors import CknScaleError, ServerBusy
from ckn_scale.search.engine import Index, open_index

INDEXED = (*PHOTOS[:8], *DISTRACTORS[:8])
QUERIES = PHOTOS[:6]
K = 5
TINY = ("--preset", "tiny", "--set", "plan.images_per_shard=4")
EVENTS = ("append", "delete", "append", "rollback", "gc")
KILLS = ("shards-0", "ingress", "encoder", "shards-1")
GROWTH = 1.25  # of the last third's memory over the middle third's
Seen = tuple[int, str, bool, tuple[tuple[int, float], ...]]  # version, query, partial, ids and scores


@dataclass
class Tally:
    """What clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    answers: Counter[Seen] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, seconds: float, seen: Seen | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            self.seconds.append(seconds)
            if seen is not None:
                self.answers[seen] += 1


class CountingTransport(httpx.HTTPTransport):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        with self._tally.lock:
            self._tally.statuses[response.status_code] += 1
        return response


def ask_until(ended: threading.Event, url: str, tally: Tally, seed: int) -> None:
    rng, views = random.Random(seed), {photo: query_view(photo) for photo in QUERIES}
    retries = Retries(attempts=40, max_wait_s=60)
    with Client(url, key=KEY, retries=retries, transport=CountingTransport(tally)) as client:
        while not ended.is_set():
            photo, began = rng.choice(QUERIES), time.monotonic()
            try:
                answer = client.search(views[photo], K)
            except ServerBusy as error:
                tally.note("busy" if error.status == 429 else f"lost: {error}", time.monotonic() - began)
            except CknScaleError as error:
                tally.note(f"lost: {type(error).__name__} {error}", time.monotonic() - began)
            else:
                seen = (answer.version, photo, answer.partial, list_hits(answer))
                tally.note("partial" if answer.partial else "whole", time.monotonic() - began, seen)


def list_hits(answer: Answer) -> tuple[tuple[int, float], ...]:
    return tuple((hit.image_id, hit.score) for hit in answer)


class Disturber:
    """Changes the run and kills replicas, one after the other."""

    def __init__(self, images: Path, run: Path, server: RunningServer, seed: int) -> None:
        self.images, self.run, self.server = images, run, server
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()

    def go_on_until(self, ends: float, pause_s: float) -> None:
        """Each change of the run goes on while a replica dies."""
        for event, victim in self._deck():
            if time.monotonic() > ends:
                return
            with subprocess.Popen(getattr(self, event)(), stderr=subprocess.PIPE, text=True) as changing:
                time.sleep(self.rng.uniform(0.0, 4.0))
                self.kill(victim)
                _, complaints = changing.communicate()
            if changing.returncode != 0:
                raise SystemExit(f"{event} ended with {changing.returncode}: {complaints}")
            self.done[event] += 1
            time.sleep(pause_s)

    def _deck(self) -> Iterator[tuple[str, str]]:
        while True:
            events = self.rng.sample(EVENTS, len(EVENTS))
            yield from zip(events, (*KILLS, self.rng.choice(KILLS)), strict=True)

    def append(self) -> list[str]:
        number = self.done["append"]
        view = render_view(
            read_photo(PHOTOS[number % len(PHOTOS)]), sorted(VIEWS)[number % len(VIEWS)], number
        )
        (self.images / f"added-{number:04d}.jpg").write_bytes(encode_jpeg(view, 88))
        return index_command("index", self.images, self.run, *TINY, "--append", "--accept", "--workers", "0")

    def delete(self) -> list[str]:
        place = min(
            self.done["delete"], len(INDEXED) - 1
        )  # nothing is left then, and the same id is named again
        return index_command("delete", self.run, str(len(INDEXED) - 1 - place))

    def rollback(self) -> list[str]:
        current = open_index(self.run).version
        return index_command("rollback", self.run, str(self.rng.randint(1, max(1, current - 1))))

    def gc(self) -> list[str]:
        return index_command("gc", self.run, "--grace-h", "0")

    def kill(self, deployment: str) -> None:
        pid = wait_for(lambda: self.server.find_replica(deployment), f"a replica of {deployment}")
        os.kill(pid, signal.SIGKILL)
        self.done[f"kill {deployment}"] += 1


class MemoryWatch:
    """Megabytes of the server and all that it started, each shared page counted once."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.megabytes: list[float] = []

    def watch_until(self, ended: threading.Event) -> None:
        while not ended.wait(2.0):
            pids = (self.server.process.pid, *list_descendants(self.server.process.pid))
            self.megabytes.append(sum(map(read_pss_mb, pids)))

    def peaks(self) -> list[float]:
        """Of each third of the time."""
        third = max(1, len(self.megabytes) // 3)
        parts = (self.megabytes[:third], self.megabytes[third : 2 * third], self.megabytes[2 * third :])
        return [round(max(part, default=0.0)) for part in parts]


def read_pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def find_wrong(tally: Tally, run: Path) -> list[str]:
    """Answers that are not those of their version, opened in this process."""
    wrong = []
    indexes: dict[int, Index] = {}
    expected: dict[tuple[int, str], dict[int, float]] = {}
    for version, photo, partial, hits in sorted(tally.answers):
        if (version, photo) not in expected:
            index = indexes.setdefault(version, open_index(run, version))
            everything = index.search(query_view(photo), k=len(index))
            expected[version, photo] = {hit.image_id: hit.score for hit in everything}
        scores = expected[version, photo]
        best = list(scores.items())[:K]
        known = all(abs(scores.get(image_id, -1) - score) < 1e-3 for image_id, score in hits)
        if not known or (not partial and [image_id for image_id, _ in hits] != [one for one, _ in best]):
            wrong.append(f"version {version}, {photo}, partial {partial}: {hits} instead of {best}")
    return wrong


def soak(
    folder: Path, minutes: float, clients: int, seed: int, pause_s: float
) -> tuple[dict[str, object], bool]:
    images, run = folder / "images", folder / "run"
    images.mkdir()
    for name in INDEXED:
        (images / f"{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 92))
    subprocess.run(index_command("index", images, run, *TINY, "--accept", "--workers", "0"), check=True)
    server = start_server(
        folder, run_url=str(run), shard_groups=2, api_keys=[KEY], version_poll_s=0.5, shard_timeout_s=2.0
    )
    tally, ended = Tally(), threading.Event()
    disturber, memory = Disturber(images, run, server, seed), MemoryWatch(server)
    threads = [
        threading.Thread(target=ask_until, args=(ended, server.url, tally, seed + one))
        for one in range(clients)
    ]
    threads.append(threading.Thread(target=memory.watch_until, args=(ended,)))
    try:
        for thread in threads:
            thread.start()
        began = time.monotonic()
        disturber.go_on_until(began + 60 * minutes, pause_s)
        wait_for(lambda: is_whole_again(server, run), "whole answers of the last version")
        took_s = time.monotonic() - began
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        stop_server(server)
    return judge(tally, disturber, memory, find_wrong(tally, run), took_s)


def is_whole_again(server: RunningServer, run: Path) -> bool:
    answer = server.search(query_view(QUERIES[0]), k=1)
    newest = open_index(run).version
    return answer.status_code == 200 and not answer.json()["partial"] and answer.json()["version"] == newest


def judge(
    tally: Tally, disturber: Disturber, memory: MemoryWatch, wrong: list[str], took_s: float
) -> tuple[dict[str, object], bool]:
    for line in wrong:
        print(f"WRONG {line}")
    lost = {outcome: count for outcome, count in tally.outcomes.items() if outcome.startswith("lost")}
    _, middle, last = memory.peaks()
    quantiles = statistics.quantiles(tally.seconds, n=100) if len(tally.seconds) > 1 else [0.0] * 99
    figures: dict[str, object] = {
        "seconds": round(took_s),
        "calls": sum(tally.outcomes.values()),
        "whole": tally.outcomes["whole"],
        "partial": tally.outcomes["partial"],
        "busy": tally.outcomes["busy"],
        "lost": lost,
        "wrong": len(wrong),
        "statuses": dict(sorted(tally.statuses.items())),
        "versions": len({seen[0] for seen in tally.answers}),
        "events": dict(disturber.done),
        "call_p50_ms": round(1e3 * quantiles[49]),
        "call_p99_ms": round(1e3 * quantiles[98]),
        "memory_peaks_mb": memory.peaks(),
    }
    return figures, not lost and not wrong and last <= GROWTH * middle


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A server under load while its run changes and replicas die."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=2.0, help="between one disturbance and the next")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckn-soak-") as folder:
        figures, well = soak(
            Path(folder), arguments.minutes, arguments.clients, arguments.seed, arguments.pause_s
        )
    print("well" if well else "NOT well")
    print(json.dumps(figures))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
