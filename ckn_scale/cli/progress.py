"""Progress on stderr: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import os
import re
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ckn_scale.runners.driver import Progress

PLAIN_EVERY_S = 15.0
LIVE_EVERY_S = 0.2


class ProgressDisplay:
    """`show_step` is an `on_progress` of the driver, `show_count` one of an evaluation.

    In a terminal the bar is erased when the context ends; in a log nothing but whole lines is written.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream, self._quiet = stream or sys.stderr, quiet
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        self._live = self._stream.isatty() and not dumb
        self._bar: Bar | None = None
        self._what, self._began_at, self._shown_at = "", 0.0, 0.0
        self._remaining = RemainingTime()
        self._finished: set[str] = set()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_bar()

    def show_step(self, progress: Progress) -> None:
        """A bar for the step under way, and one line that stays for each step that has ended."""
        ended = progress.done >= progress.total
        if self._quiet or progress.total == 0 or (ended and progress.step in self._finished):
            return
        self._begin(progress.step)
        count, total = progress.done, progress.total
        if progress.total_images:
            count, total = progress.images, progress.total_images
        left_s = self._remaining.estimate(count, total, progress.seconds)
        if ended:
            self._finished.add(progress.step)
            self._close_bar()
            self._write(f"{format_title(progress.step):<27}{format_progress(progress, left_s)}")
        else:
            self._show(format_title(progress.step), format_progress(progress, left_s), count, total)

    def show_count(self, what: str, done: int, total: int) -> None:
        """`done` of `total` things; a total of 0 means it is not known."""
        if self._quiet:
            return
        self._begin(what)
        seconds = time.monotonic() - self._began_at
        left_s = self._remaining.estimate(done, total, seconds) if total else None
        self._show(what, format_count(done, total, left_s), done, total)

    def show_line(self, line: str) -> None:
        """One that stays, above whatever bar comes next."""
        if not self._quiet:
            self._close_bar()
            self._what = ""
            self._write(line)

    def _begin(self, what: str) -> None:
        if what != self._what:
            self._close_bar()
            self._what, self._began_at, self._remaining = what, time.monotonic(), RemainingTime()
            self._shown_at = 0.0 if self._live else self._began_at

    def _show(self, title: str, text: str, count: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown_at < (LIVE_EVERY_S if self._live else PLAIN_EVERY_S):
            return
        self._shown_at = now
        if not self._live:
            self._write(f"{title:<27}{text}")
            return
        if self._bar is None:
            self._bar = self._open_bar(title)
        self._bar.update(
            self._bar.task_ids[0], completed=count, total=total or None, text=text.lstrip(), refresh=True
        )

    def _open_bar(self, title: str) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=self._stream)
        columns = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
        ]
        # Without a thread: the driver reports at least once a second. Without stdout, which may be a file.
        bar = Progress(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False)
        bar.add_task(title, text="")
        bar.start()
        console.show_cursor(True)  # an interrupt leaves no time to bring it back
        return bar

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class RemainingTime:
    """How long something still takes by the pace of this call; between two counts it falls with the clock."""

    def __init__(self) -> None:
        self._first: int | None = None  # what earlier calls had done
        self._last, self._ends_s = 0, 0.0

    def estimate(self, count: int, total: int, seconds: float) -> float | None:
        """Seconds left, `seconds` after the start; None before the first count."""
        if self._first is None:
            self._first = self._last = count
        if count != self._last:
            self._last = count
            made = max(1, count - self._first)
            self._ends_s = seconds * (1 + (total - count) / made)
        return None if self._ends_s == 0 else max(0.0, self._ends_s - seconds)


def format_title(label: str) -> str:
    """A step's label without the digest of a build, which says nothing to a person."""
    return re.sub(r"-[0-9a-f]{16}$", "", label)


def format_progress(progress: Progress, left_s: float | None) -> str:
    """`96/320 images  12/40 shards  about 18 s left`."""
    text = f"{progress.done:>6}/{progress.total} shards"
    if progress.total_images:
        text = f"{progress.images:>6}/{progress.total_images} images  {text.lstrip()}"
    if progress.done >= progress.total:
        return text + (f"  {progress.seconds:.1f} s" if progress.seconds > 0 else "  done before")
    return text if left_s is None else f"{text}  about {left_s:.0f} s left"


def format_count(done: int, total: int, left_s: float | None) -> str:
    """`5/12  about 18 s left`."""
    if not total:
        return f"{done} done"
    return (
        f"{done}/{total}" if left_s is None or done >= total else f"{done}/{total}  about {left_s:.0f} s left"
    )
