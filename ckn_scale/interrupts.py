"""Ctrl-C ends a command with one line; its worker processes never see it.

A terminal sends SIGINT to every process of its group. Workers are started with it blocked, and ended
by the process that started them: what is not recorded does not count, so nothing is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
SENTENCE = "ckn-scale: interrupted; run the same command again to go on"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEANUP_S = 15.0  # for ending workers and a Ray of our own; then the process ends whatever it waits for


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started in here, and theirs, never see what a terminal sends to its group."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which multiprocessing starts with its first child, unblocking SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Handlers stand after the block as before it: ray.init replaces that of SIGTERM by sys.exit."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as left:
        handler = before[signal.SIGTERM]
        if left.code == signal.SIGTERM and callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        with contextlib.suppress(ValueError):  # only the main thread may, and only there Ray does
            for number, kept in before.items():
                signal.signal(number, kept)


def end_on_signals() -> None:
    """From now on a signal says the sentence and raises KeyboardInterrupt, so that all is ended in order."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup, or a shell for `command &`, wants it
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # a second Ctrl-C would only leave processes behind
    signal.signal(signal.SIGALRM, _shut_down)
    signal.setitimer(signal.ITIMER_REAL, CLEANUP_S)
    say_interrupted()
    raise KeyboardInterrupt


def say_interrupted() -> None:
    """The sentence, and nothing after it: whatever libraries have to say of their end is of no use."""
    line = f"\r\x1b[K{SENTENCE}\n" if os.isatty(2) else f"{SENTENCE}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())  # not sys.stderr, in the middle of whose write we may be
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def was_interrupted() -> bool:
    return signal.getsignal(signal.SIGALRM) is _shut_down


def end_interrupted() -> NoReturn:
    """The process ends in order, but for threads inside of native code: Python's own end aborts in them."""
    _kill_children()
    atexit._run_exitfuncs()  # Ray ends in there what an interrupted ray.init has started
    os._exit(EXIT_CODE)


def _shut_down(number: int, frame: FrameType | None) -> None:
    _kill_children()
    os._exit(EXIT_CODE)


def _kill_children() -> None:
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
