"""A bar with rate and remaining time while something long goes on; a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

EVERY_S, PLAIN_EVERY_S = 0.2, 15.0
WIDTH = 24


class ProgressBar:
    """Call it with (what, done, total); a total of 0 means it is not known."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._what, self._started, self._shown = "", 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._started = what, now
        if not self._live:
            self._show_plain(format_bar(what, done, total, now - self._started), now)
            return
        if now - self._shown >= EVERY_S or done >= total:
            self._shown = now
            self._stream.write("\r\x1b[K" + format_bar(what, done, total, now - self._started))
            self._stream.flush()

    def _show_plain(self, line: str, now: float) -> None:
        """In a log: a line now and then."""
        if self._shown == 0.0:
            self._shown = now
        elif now - self._shown >= PLAIN_EVERY_S:
            self._shown = now
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Clear the line: what follows is the result."""
        if self._live and self._what:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def format_bar(what: str, done: int, total: int, seconds: float) -> str:
    """`grid  ██████████········  5/12  0.4/s  18 s left`."""
    if total <= 0:
        return f"{what}  {done} done"
    full = WIDTH * done // total
    line = f"{what}  {'█' * full}{'·' * (WIDTH - full)}  {done}/{total}"
    if 1 < done <= total and seconds > 0:
        # The clock starts with the first one done.
        rate = (done - 1) / seconds
        line += f"  {rate:.1f}/s"
        if done < total and rate > 0:
            line += f"  {(total - done) / rate:.0f} s left"
    return line
