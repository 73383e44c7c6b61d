"""One updating line in a terminal; plain lines, now and then, when it is not one."""

from __future__ import annotations

import re
import sys
import time
from typing import TextIO

from ckn_scale.runners.driver import Progress

PLAIN_EVERY_S = 15.0
LIVE_EVERY_S = 0.2


class ProgressLine:
    """Hand it to whatever takes an `on_progress`."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._quiet = quiet
        self._step, self._shown_at = "", 0.0
        self._finished: set[str] = set()
        self._remaining = RemainingTime()

    def __call__(self, progress: Progress) -> None:
        ended = progress.done >= progress.total
        if self._quiet or progress.total == 0 or (ended and progress.step in self._finished):
            return
        now = time.monotonic()
        begins = progress.step != self._step
        if begins:
            self._step, self._shown_at, self._remaining = progress.step, now, RemainingTime()
        left_s = self._remaining.estimate(progress)
        is_due = now - self._shown_at >= (LIVE_EVERY_S if self._live else PLAIN_EVERY_S)
        if ended or is_due or (begins and self._live):
            self._show(format_progress(progress, left_s), ended)
            self._shown_at = now
        if ended:
            self._finished.add(progress.step)

    def _show(self, line: str, ended: bool) -> None:
        if self._live:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if ended else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


class RemainingTime:
    """How long a step still takes by the pace of this call; between two counts it falls with the clock."""

    def __init__(self) -> None:
        self._first: int | None = None  # what earlier calls had done
        self._last, self._ends_s = 0, 0.0

    def estimate(self, progress: Progress) -> float | None:
        """Seconds, counted in images where the step has any, else in shards; None before the first one."""
        count, total = progress.done, progress.total
        if progress.total_images:
            count, total = progress.images, progress.total_images
        if self._first is None:
            self._first = self._last = count
        if count != self._last:
            self._last = count
            made = max(1, count - self._first)
            self._ends_s = progress.seconds * (1 + (total - count) / made)
        return None if self._ends_s == 0 else max(0.0, self._ends_s - progress.seconds)


def title_of(label: str) -> str:
    """A step's label without the name of a build, which says nothing to a person."""
    return re.sub(r"-[0-9a-f]{16}$", "", label)


def format_progress(progress: Progress, left_s: float | None) -> str:
    """`encode_images    96/320 images  12/40 shards  about 18 s left`."""
    line = f"{title_of(progress.step):<27}"
    if progress.total_images:
        line += (
            f"{progress.images:>6}/{progress.total_images} images  {progress.done}/{progress.total} shards"
        )
    else:
        line += f"{progress.done:>6}/{progress.total} shards"
    if progress.done >= progress.total:
        return line + (f"  {progress.seconds:.1f} s" if progress.seconds > 0 else "  done before")
    return line if left_s is None else f"{line}  about {left_s:.0f} s left"
