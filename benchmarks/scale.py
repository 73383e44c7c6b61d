"""An index from ten thousand rows to a billion: disk, memory, time to open and to answer, kept firsts.

    python benchmarks/scale.py [--rows 10000,100000,1000000] [--run RUN] [--json FILE] [--png FILE]

Rows of 32,768 numbers as `compact` keeps them: signs in files that are mapped, short codes in memory (pq).
RUN is a published run of some hundred images or more, made with `compact`: its planted queries are asked,
their originals lie among the rows as they are, and its other images are what all other rows and their points
are cut together from (`generated_index.py`). Without RUN there are random vectors, queries of similarity
0.25, and no points. Files are written once, in eight shards or more; another process opens them and is asked,
one thread, CPU time, warm; a third one after all files have left the system's cache (cold).

*Kept*: of the queries that a comparison of all signs answers, those with the same first; with evidence, of
those that a shortlist by all signs and evidence answers. Memory is anonymous memory (mapped files are the
system's cache), its peak while the index is opened, against `predict_memory`. Ten million rows are codes
alone, made in memory: a scan of all, and of a quarter of 1,024 lists. Larger ones are groups of ten million
by the line through what was measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from generated_index import DEPTH, DIM, draw_sources, mix, read_sources, units, write_index

from ckn_scale.core.coarse_lists import choose_codec
from ckn_scale.core.evidence import SHORTLIST, QueryPoints, choose_head
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.ranking import Ranking
from ckn_scale.core.short_codes import CodeScan, Quantiser, learn_quantiser
from ckn_scale.search.evidence import gather_evidence, score_points_of, verify_points_of
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.shortlist import predict_memory
from ckn_scale.storage.index_files import read_manifest
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile

K = 10
GENERATED_ROWS, LISTS = 10_000_000, 1024
COLD_QUERIES = 8


class AnonymousPeak:
    """The largest anonymous memory of this process since it was entered, sampled."""

    def __enter__(self) -> AnonymousPeak:
        self.before = self.peak = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.peak, _anonymous_bytes()) - self.before


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def spent_ms(call: Callable[[], Any]) -> float:
    begun = time.process_time()
    call()
    return 1e3 * (time.process_time() - begun)


def ask(folder: Path) -> dict[str, Any]:
    """In a process of its own: open the index and ask it."""
    reference, queries, points, places = pickle.loads((folder / "asked.pkl").read_bytes())
    store = Store(str(folder))
    manifest = read_manifest(store, StoredFile(**reference))
    with AnonymousPeak() as memory:
        begun = time.process_time()
        group = ShardGroup(store, manifest)
        open_s = time.process_time() - begun
    begun = time.process_time()
    ShardGroup(store, manifest)
    again_s = time.process_time() - begun
    group.find(queries, K)
    single = [spent_ms(lambda q=query: group.find(q[None], K)) for query in queries]
    batch = queries[np.arange(64) % len(queries)]
    batch_ms = min(spent_ms(lambda: group.find(batch, K)) for _ in range(3)) / len(batch)
    plain = ShardGroup(store, replace(manifest, short_codes=None))
    begun = time.process_time()
    expected = [plain.find(query[None], SHORTLIST) for query in queries]
    plain_ms = 1e3 * (time.process_time() - begun) / len(queries)
    listed = group.find(queries, SHORTLIST)[1]
    found = listed[:, 0]
    right = np.array([ids[0, 0] for _, ids in expected]) == places
    predicted = predict_memory(manifest.rows, 128)
    result = {
        "open_s": open_s,
        "open_again_s": again_s,
        "ms_batch_1": float(np.median(single)),
        "ms_batch_64": batch_ms,
        "plain_ms": plain_ms,
        "plain_first": int(right.sum()),
        "queries": len(queries),
        "kept": float(np.mean(found[right] == places[right])),
        "on_shortlist": float(np.mean((listed == places[:, None]).any(axis=1))),
        "memory_bytes": memory.bytes,
        "predicted_to_actual": predicted / max(1, memory.bytes),
    }
    if points is not None:
        result |= measure_evidence(group, queries, points, places, expected)
    return result


def measure_evidence(
    group: ShardGroup,
    queries: np.ndarray,
    points: Sequence[QueryPoints],
    places: np.ndarray,
    expected: Sequence[tuple[np.ndarray, np.ndarray]],
) -> dict[str, Any]:
    """Stages of a verified answer, warm; and its firsts against those of a shortlist by all signs."""
    answer_by_stages(group, queries[0], points[0])
    answers = [answer_by_stages(group, *one) for one in zip(queries, points, strict=True)]
    stages = {name: float(np.median([cost[name][0] for _, cost in answers])) for name in answers[0][1]}
    firsts = np.array([int(one.image_ids[one.order()[0]]) for one, _ in answers]) == places
    full = [
        gather_evidence(group, one, ids[0], similarity[0])
        for one, (similarity, ids) in zip(points, expected, strict=True)
    ]
    right = np.array([int(one.image_ids[one.order()[0]]) for one in full]) == places
    return {
        "stages_ms": stages,
        "evidence_ms": float(np.median([sum(ms for ms, _ in cost.values()) for _, cost in answers])),
        "plain_verified_first": int(right.sum()),
        "verified_first": int(firsts.sum()),
        "verified_kept": float(np.mean(firsts[right])),
    }


def answer_by_stages(
    group: ShardGroup, vector: np.ndarray, points: QueryPoints
) -> tuple[Ranking, dict[str, tuple[float, float]]]:
    """The answer, and CPU and wall milliseconds of shortlist, scores by words, and geometry of the head."""
    cost: dict[str, tuple[float, float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun, wall = time.process_time(), time.perf_counter()
        result = call()
        cost[name] = 1e3 * (time.process_time() - begun), 1e3 * (time.perf_counter() - wall)
        return result

    similarity, ids = timed("shortlist", lambda: group.find(vector[None], SHORTLIST))
    selective = timed("words", lambda: score_points_of(group, points, ids[0]))
    head = ids[0][choose_head(ids[0], similarity[0], selective)]
    evidence = timed("geometry", lambda: verify_points_of(group, points, head))
    found = dict(zip(head.tolist(), evidence, strict=True))
    return Ranking(ids[0], similarity[0], selective, found, {}), cost


def ask_cold(folder: Path) -> dict[str, Any]:
    """Queries that nobody asked before, once no file is in the system's cache."""
    reference, queries, points, _ = pickle.loads((folder / "asked.pkl").read_bytes())
    store = Store(str(folder))
    group = ShardGroup(store, read_manifest(store, StoredFile(**reference)))
    for path in (folder / "index").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    costs = [answer_by_stages(group, *one)[1] for one in zip(queries[:COLD_QUERIES], points, strict=False)]
    return {
        "cold_stages_ms": {name: float(np.median([one[name][0] for one in costs])) for name in costs[0]},
        "cold_wall_ms": {name: float(np.median([one[name][1] for one in costs])) for name in costs[0]},
    }


def scan_generated(rows: int) -> dict[str, Any]:
    """Short codes of so many rows, made in memory: a scan of all, and of a quarter of the lists."""
    vectors = units(np.random.default_rng(0).standard_normal((512, DIM)))
    result: dict[str, Any] = {"rows": rows}
    for kind, lists in (("pq", 0), ("ivf-pq", LISTS)):
        quantiser = learn_quantiser(vectors, seed=0)
        if lists:  # which rows are in them does not matter to the time
            coarse = choose_codec(DIM).encode(np.repeat(vectors, 2, axis=0))
            quantiser = Quantiser(DIM, quantiser.centroids, coarse)
        codes = np.concatenate(list(mix(quantiser.encode(vectors), rows, 8, 7)))
        owners = np.random.default_rng(2).integers(0, max(1, lists), rows, dtype=np.int32)
        with AnonymousPeak() as memory:
            scan = CodeScan(quantiser, [codes], [owners], max(1, lists // 4))
        scan.shortlist(vectors[:1], DEPTH, K)
        spent = [spent_ms(lambda s=scan, q=query: s.shortlist(q[None], DEPTH, K)) for query in vectors[:16]]
        result[kind] = {"scan_ms": float(np.median(spent)), "memory_bytes": memory.bytes}
        predicted = CodeScan.predict_memory(rows, quantiser.code_bytes, lists)
        result[kind]["predicted_to_actual"] = predicted / memory.bytes
        del codes, scan
    return result


def run_apart(cache: str, *arguments: str) -> dict[str, Any]:
    """This script in another process, which prints its result."""
    command, environment = [sys.executable, __file__, *arguments], {**os.environ, "CKN_SCALE_CACHE": cache}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def extrapolate(measured: list[dict[str, Any]], generated: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Groups of ten million rows, each with a core: by the line through what was measured."""
    sizes = np.array([one["rows"] for one in measured], float)
    lines = {
        name: np.polyfit(sizes, [one[name] for one in measured], 1)
        for name in ("ms_batch_1", "memory_bytes", "open_again_s")
    }
    group = {name: float(np.polyval(line, GENERATED_ROWS)) for name, line in lines.items()}
    if generated is not None:  # what few lists save of a scan
        group["ms_lists"] = group["ms_batch_1"] - generated["pq"]["scan_ms"] + generated["ivf-pq"]["scan_ms"]
    verifying = measured[-1].get("evidence_ms", 0.0) - measured[-1].get("stages_ms", {}).get("shortlist", 0.0)
    return [
        {
            "rows": total,
            "groups": -(-total // GENERATED_ROWS),
            "disk_bytes": measured[-1]["disk_bytes_per_row"] * total,
            "points_bytes": measured[-1]["points_bytes_per_row"] * total,
            "memory_bytes_a_group": group["memory_bytes"],
            "ms_a_group": group["ms_batch_1"],
            "ms_a_group_with_lists": group.get("ms_lists"),
            "ms_of_evidence": verifying,
            "open_again_s": group["open_again_s"],
            "code_core_s": total / measured[-1]["code_rows_per_s"],
        }
        for total in (10**7, 10**8, 10**9)
    ]


def draw(measured: list[dict[str, Any]], fitted: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    panels: tuple[tuple[str, Callable[..., float], Callable[..., float]], ...] = (
        (
            "disk without points, GB",
            lambda one: one["disk_bytes_per_row"] * one["rows"] / 1e9,
            lambda one: one["disk_bytes"] / 1e9,
        ),
        (
            "memory, GB",
            lambda one: one["memory_bytes"] / 1e9,
            lambda one: one["groups"] * one["memory_bytes_a_group"] / 1e9,
        ),
        ("ms a query, one core a group", lambda one: one["ms_batch_1"], lambda one: one["ms_a_group"]),
    )
    for axis, (title, seen, fit) in zip(axes, panels, strict=True):
        for rows, value, form, label in ((measured, seen, "o-", "measured"), (fitted, fit, "s--", "fit")):
            axis.loglog([one["rows"] for one in rows], [value(one) for one in rows], form, label=label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("images")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def measure(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    sources = draw_sources(64) if options.run is None else read_sources(options.run, options.queries)
    if options.no_points:
        sources = replace(sources, records=None, planted_records=None, points=None)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tempfile.TemporaryDirectory() as cache:
        one = write_index(Path(folder), rows, sources)
        one |= run_apart(cache, "--ask", folder)
        if sources.points is not None:
            one |= run_apart(cache, "--ask-cold", folder)
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--run", help="a published run whose images rows are made of")
    parser.add_argument("--queries", type=int, default=100, help="of RUN, at most")
    parser.add_argument("--folder", type=Path, help="where files are written; a temporary one by default")
    parser.add_argument("--no-points", action="store_true", help="vectors alone: 4 GB a million rows, not 25")
    parser.add_argument("--no-generated", action="store_true", help="leave out the ten million")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ask-cold", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scan", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    set_compute_threads(1)
    for wanted, call in ((options.ask, ask), (options.ask_cold, ask_cold), (options.scan, scan_generated)):
        if wanted is not None:
            print(json.dumps(call(wanted)))
            return
    measured = []
    for rows in [int(one) for one in options.rows.split(",")]:
        measured.append(measure(rows, options))
        print(json.dumps(measured[-1]), flush=True)
    generated = None if options.no_generated else run_apart("", "--scan", str(GENERATED_ROWS))
    fitted = extrapolate(measured, generated) if len(measured) > 1 else []
    for line in (generated, *fitted):
        print(json.dumps(line), flush=True)
    if options.json is not None:
        every = {"measured": measured, "generated": generated, "fit": fitted}
        options.json.write_text(json.dumps(every, indent=1))
    if options.png is not None and fitted:
        draw(measured, fitted, options.png)


if __name__ == "__main__":
    main()
