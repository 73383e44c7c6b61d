"""CPU time of this process and all it started: what work costs on a machine that others use too."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

import numpy as np

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CpuTime:
    """Samples the whole tree of processes in a thread, as long as it is entered."""

    def __init__(self, every_s: float = 0.25) -> None:
        self.every_s = every_s
        self._at: list[float] = []
        self._spent_s: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> CpuTime:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> float:
        """CPU seconds between two times of `time.time()`; processes that ended meanwhile are not counted."""
        first, last = np.interp([start, end], self._at, self._spent_s)
        return float(last - first)

    def _sample(self) -> None:
        while not self._ended.wait(self.every_s):
            self._at.append(time.time())
            self._spent_s.append(sum_tree(os.getpid()))


def sum_tree(root: int) -> float:
    """CPU seconds of a process and its living descendants."""
    stats = dict(_read_stats())
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += stats.get(pid, (0, 0.0))[1]
        waiting += children.get(pid, [])
    return total


def _read_stats() -> list[tuple[int, tuple[int, float]]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        found.append((int(path.parent.name), (int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_S)))
    return found
