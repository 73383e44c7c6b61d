"""A live line per step in a terminal; plain lines, now and then, when it is not one."""

from __future__ import annotations

import re
import sys
import time
from typing import TextIO

from ckn_scale.runners.base import Progress

PLAIN_EVERY_S = 15.0
LIVE_EVERY_S = 0.2


class ProgressLine:
    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._quiet = quiet
        self._last_step, self._last_shown = "", 0.0
        self._finished: set[str] = set()

    def __call__(self, progress: Progress) -> None:
        ended = progress.done >= progress.total
        if self._quiet or progress.total == 0 or (ended and progress.step in self._finished):
            return
        now = time.monotonic()
        every_s = LIVE_EVERY_S if self._live else PLAIN_EVERY_S
        begins = progress.step != self._last_step
        if not (begins or ended or now - self._last_shown >= every_s):
            return
        if not self._live and begins and not ended:
            self._last_step, self._last_shown = progress.step, now
            return
        self._show(format_progress(progress), ended)
        self._last_step, self._last_shown = progress.step, now
        if ended:
            self._finished.add(progress.step)

    def _show(self, line: str, ended: bool) -> None:
        if self._live:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if ended else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def title_of(label: str) -> str:
    """A step's label without the name of a build, which says nothing to a person."""
    return re.sub(r"-[0-9a-f]{16}$", "", label)


def format_progress(progress: Progress) -> str:
    """`encode_images    12/40 shards   96 images   13.1/s   18 s left`."""
    line = f"{title_of(progress.step):<27}{progress.done:>6}/{progress.total} shards"
    if progress.images and progress.seconds > 0:
        line += f"  {progress.images} images  {progress.images / progress.seconds:.1f}/s"
    if 0 < progress.done < progress.total and progress.seconds > 0 and progress.images:
        left_s = progress.seconds / progress.done * (progress.total - progress.done)
        line += f"  about {left_s:.0f} s left"
    elif progress.done >= progress.total:
        line += f"  {progress.seconds:.1f} s" if progress.seconds > 0 else "  done before"
    return line
