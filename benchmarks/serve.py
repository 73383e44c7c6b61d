"""Queries a second and milliseconds of a query over HTTP, against the same search in process.

    python benchmarks/serve.py RUN IMAGES [--modes encode,process,local,ray,ray-fast] [--seconds 8]

RUN is a published run, IMAGES a folder of photographs that ask, each as it is. `encode` is the server's
encoder alone, with one thread and with as many as there are cores; `process` is `open_index` in this process,
one query after the other, then in as many threads as there are cores; `local` is `serve --local`; `ray` is
`serve`; `ray-fast` is the same with RAY_SERVE_THROUGHPUT_OPTIMIZED and HAProxy. 1, 8, 32 `--clients` ask for
`--seconds` each, on loopback; then one sends batches of eight, where the server takes them. Who is refused
(429) waits as told, and refusals are counted. Start-up is the time until the server says that it is ready,
memory that of all its processes after the last query (PSS). CPU is that of all processes that answer, without
the clients: it says most where others use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

K = 10
IDLE_S = 5.0
BATCH = 8
FAST = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
SERVER = """
import json, sys
from ckn_scale.serving.app import serve_run
from ckn_scale.serving.local import serve_local
mode, arguments = sys.argv[1], json.loads(sys.argv[2])
serve = serve_local if mode == "local" else serve_run
serve(**arguments, on_ready=lambda serving: print(serving.url, flush=True))
"""


@dataclass(frozen=True)
class Load:
    """What some clients saw."""

    mode: str
    groups: int
    clients: int
    batch: int
    queries_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float  # of a query
    refused: int
    failed: int


class Seen:
    """What clients note, and what the processes that answer spend meanwhile."""

    def __init__(self, pid: int) -> None:
        self.took_ms: list[float] = []
        self.refused = 0
        self.failed = 0
        self._pid = pid
        self._began_s, self._cpu_s = time.perf_counter(), read_cpu_s(pid)

    def summarise(self, mode: str, groups: int, clients: int, batch: int = 1) -> Load:
        p50, p99 = np.percentile(self.took_ms, [50, 99]) if self.took_ms else (np.nan, np.nan)
        answered = batch * len(self.took_ms)
        rate = answered / (time.perf_counter() - self._began_s)
        cpu_ms = 1e3 * (read_cpu_s(self._pid) - self._cpu_s) / max(answered, 1)
        return Load(
            mode, groups, clients, batch, rate, float(p50), float(p99), cpu_ms, self.refused, self.failed
        )


def measure_encoder(run: str, images: list[bytes], seconds: float) -> Iterator[Load]:
    """Twice as many queries at once as it has threads."""
    from ckn_scale.serving.replicas import EncoderReplica
    from ckn_scale.serving.settings import ServeSettings

    async def ask(encoder: EncoderReplica, number: int, seen: Seen, ends: float) -> None:
        place = number
        while (started := time.perf_counter()) < ends:
            await encoder.encode(1, images[place % len(images)], None)
            seen.took_ms.append(1e3 * (time.perf_counter() - started))
            place += 1

    async def ask_at_once(encoder: EncoderReplica, clients: int) -> Seen:
        await encoder.encode(1, images[0], None)
        seen, ends = Seen(os.getpid()), time.perf_counter() + seconds
        await asyncio.gather(*(ask(encoder, number, seen, ends) for number in range(clients)))
        return seen

    for threads in sorted({1, os.cpu_count() or 1}):
        encoder = EncoderReplica(ServeSettings(run_url=run, encoder_threads=threads))
        yield asyncio.run(ask_at_once(encoder, 2 * threads)).summarise(f"encode/{threads}", 1, 2 * threads)
        encoder.close()


def measure_in_process(run: str, images: list[bytes], seconds: float) -> Iterator[Load]:
    """One query after the other, and one in each of as many threads as there are cores."""
    from ckn_scale.search.engine import open_index

    for threads in sorted({1, os.cpu_count() or 1}):
        indexes = [open_index(run) for _ in range(threads)]
        for index in indexes:
            index._threads = None  # the process's own number: else they take turns
            index.search(images[0], K)
        seen, ends = Seen(os.getpid()), time.perf_counter() + seconds

        def ask(index: Any, seen: Seen = seen, ends: float = ends) -> None:
            place = 0
            while (started := time.perf_counter()) < ends:
                index.search(images[place % len(images)], K)
                seen.took_ms.append(1e3 * (time.perf_counter() - started))
                place += 1

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(ask, indexes))
        yield seen.summarise("process", 1, threads)


async def measure_clients(
    url: str, pid: int, bodies: list[Any], path: str, clients: int, seconds: float
) -> Seen:
    seen, ends = Seen(pid), time.perf_counter() + seconds

    async def ask(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            place = number
            while (started := time.perf_counter()) < ends:
                try:
                    answer = await client.post(path, json=bodies[place % len(bodies)])
                except httpx.TransportError:
                    seen.failed += 1
                    continue
                if answer.status_code == 429:
                    seen.refused += 1
                    await asyncio.sleep(min(float(answer.headers["retry-after"]), seconds / 4))
                    continue
                if answer.status_code != 200:
                    seen.failed += 1
                    continue
                seen.took_ms.append(1e3 * (time.perf_counter() - started))
                place += 1

    await asyncio.gather(*(ask(number) for number in range(clients)))
    return seen


def measure_server(
    url: str, pid: int, mode: str, groups: int, images: list[bytes], options: argparse.Namespace
) -> Iterator[Load]:
    bodies = [{"image": base64.b64encode(image).decode(), "k": K} for image in images]
    asyncio.run(measure_clients(url, pid, bodies, "/v1/search", 1, 2.0))  # whatever is slow the first time
    for clients in map(int, options.clients.split(",")):
        seen = asyncio.run(measure_clients(url, pid, bodies, "/v1/search", clients, options.seconds))
        yield seen.summarise(mode, groups, clients)
    if "/v1/search:batch" in httpx.get(f"{url}/openapi.json").json()["paths"]:
        batch = [{"queries": [bodies[place % len(bodies)] for place in range(BATCH)]}]
        seen = asyncio.run(measure_clients(url, pid, batch, "/v1/search:batch", 1, options.seconds))
        yield seen.summarise(mode, groups, 1, BATCH)


@contextlib.contextmanager
def serving(mode: str, run: str, groups: int, port: int) -> Iterator[tuple[str, float, int]]:
    """Its URL, seconds of its start, and pid."""
    arguments = json.dumps({"run_url": run, "port": port, "shard_groups": groups})
    environment = {**os.environ, **(FAST if mode == "ray-fast" else {})}
    begun = time.perf_counter()
    command = [sys.executable, "-c", SERVER, mode, arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit(f"{mode}: the server ended with {process.wait()} before it answered")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield url, time.perf_counter() - begun, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def list_processes(pid: int) -> Iterator[Path]:
    """Of a process and all below it."""
    waiting = [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        yield process
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in (process / "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]


def measure_memory_mb(pid: int) -> float:
    """Shared pages are divided by those who share them."""
    total_kb = 0
    for process in list_processes(pid):
        with contextlib.suppress(OSError, StopIteration):
            lines = (process / "smaps_rollup").read_text().splitlines()
            total_kb += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024


def read_cpu_s(pid: int) -> float:
    ticks = 0
    for process in list_processes(pid):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def show(load: Load) -> None:
    what = f"{load.mode:9} {load.groups} groups {load.clients:3} clients" + (
        " batch" if load.batch > 1 else ""
    )
    times = f"p50 {load.p50_ms:7.0f} ms  p99 {load.p99_ms:7.0f} ms  {load.queries_per_s:6.2f} queries/s"
    times += f"  {load.cpu_ms:5.0f} ms of CPU each"
    print(f"{what:38} {times}  {load.refused} refused, {load.failed} failed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("images", type=Path)
    parser.add_argument("--modes", default="encode,process,local,ray,ray-fast")
    parser.add_argument("--groups", default="1", help="numbers of shard groups, as 1,4")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", default="1,8,32", help="how many ask at once, one after the other")
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    images = [path.read_bytes() for path in sorted(options.images.iterdir())[:16]]
    loads: list[Load] = []
    for mode in options.modes.split(","):
        if mode in ("encode", "process"):
            measure = measure_encoder if mode == "encode" else measure_in_process
            for load in measure(options.run, images, options.seconds):
                show(load)
                loads.append(load)
            continue
        for groups in map(int, options.groups.split(",")):
            with serving(mode, options.run, groups, options.port) as (url, start_s, pid):
                started_cpu_s = read_cpu_s(pid)
                time.sleep(IDLE_S)
                idle_ms = 1e3 * (read_cpu_s(pid) - started_cpu_s) / IDLE_S
                for load in measure_server(url, pid, mode, groups, images, options):
                    show(load)
                    loads.append(load)
                start = f"up in {start_s:.1f} s and {started_cpu_s:.1f} s of CPU"
                print(f"{mode:9} {groups} groups: {start}, {measure_memory_mb(pid):.0f} MB")
                print(
                    f"{mode:9} {groups} groups: {idle_ms:.0f} ms of CPU a second when nobody asks", flush=True
                )
    if options.json:
        options.json.write_text(json.dumps([asdict(load) for load in loads], indent=1))


if __name__ == "__main__":
    main()
