"""Ctrl-C ends a command with one line; its worker processes never see it.

A terminal sends SIGINT to every process of its group. Workers are started with it blocked, and ended
by the process that started them: what is not recorded does not count, so nothing is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
SENTENCE = "ckn-scale: interrupted; run the same command again to go on"
NOTHING_KEPT = "ckn-scale: interrupted; nothing was written, and the same command starts over"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEANUP_S = 15.0  # for ending workers and a Ray of our own; then the process ends whatever it waits for

_interrupted = threading.Event()  # by a signal, that the sentence reports
_saying = threading.Lock()
_deferring = False
_sentence = SENTENCE


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
def interrupts_deferred() -> Iterator[None]:
    """What is begun in the block is finished before KeyboardInterrupt is raised: nothing is half started."""
    global _deferring
    _deferring = True
    try:
        yield
    finally:
        _deferring = False
        if was_interrupted():
            raise KeyboardInterrupt


def end_on_signals() -> None:
    """From now on a signal says the sentence and raises KeyboardInterrupt, so that all is ended in order.

    Python runs no handler while native code waits (ray.init does for a minute, for a cluster that does not
    answer), so a thread hears of signals as well: it says the sentence, and ends what does not end itself.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch_signals, args=(reader,), daemon=True, name="signals").start()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup, or a shell for `command &`, wants it
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)  # a second Ctrl-C would only leave processes behind
    _say_once()
    if not _deferring:
        raise KeyboardInterrupt


def _watch_signals(reader: int) -> None:
    handler = None
    while handler is not _interrupt and not was_interrupted():  # a library may have one for a while
        (number,) = os.read(reader, 1)
        handler = signal.getsignal(number)
    _say_once()


def _say_once() -> None:
    with _saying:
        if was_interrupted():
            return
        _interrupted.set()
        say_interrupted()
        allowance = threading.Timer(CLEANUP_S, _shut_down)
        allowance.daemon = True
        allowance.start()


def wait_for_signal() -> None:
    """Until SIGINT or SIGTERM, which are how a server ends; in a thread other than the main one, for ever."""
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        ended.wait()
    watched = signal.set_wakeup_fd(-1)  # nobody is interrupted
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: ended.set()) for number in signals]
    try:
        ended.wait()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)


def say_interrupted() -> None:
    """The sentence, and nothing after it: whatever libraries have to say of their end is of no use."""
    line = f"\r\x1b[K{_sentence}\n" if os.isatty(2) else f"{_sentence}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode())  # not sys.stderr, in the middle of whose write we may be
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def keep_nothing() -> None:
    """What this process does from now on starts over when it is interrupted: the sentence says so."""
    global _sentence
    _sentence = NOTHING_KEPT


def was_interrupted() -> bool:
    return _interrupted.is_set()


def end_process(exit_code: int) -> NoReturn:
    """End in order, but for threads inside native code, such as the one of an image that is overdue.

    Python's own end makes a thread that comes back from OpenCV abort the process, with exit code 134.
    """
    _kill_children()
    atexit._run_exitfuncs()  # Ray ends in there what an interrupted ray.init has started
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _shut_down() -> NoReturn:
    _kill_children()
    os._exit(EXIT_CODE)


def _kill_children() -> None:
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
