"""Child processes: started afresh, killable in the middle of a call, and gone when their parent is.

Python's own `spawn` runs the caller's main module again in every child, so that a script which calls
`ckn_scale.index` outside of `if __name__ == "__main__"` would start itself over and over. Children of
`SPAWN` import what they need from this package and know nothing of the caller's script.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from ckn_scale.errors import CknScaleError, ImageRejected
from ckn_scale.interrupts import signals_blocked

_swapping = threading.Lock()
START_ALLOWANCE_S = 120.0  # a child imports numpy and OpenCV before its first call
EXIT_ALLOWANCE_S = 5.0  # between the end of its pipe and its own end, whose code is reported
Answer = TypeVar("Answer")


class ChildOverdue(Exception):
    """The call took longer than its deadline; the child was killed."""


class ChildDied(Exception):
    """The child ended in the middle of a call."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"its process ended with code {exit_code}")
        self.exit_code = exit_code


class KillableChild(Generic[Answer]):
    """Calls `function` (picklable) in a spawned process; after a death the next call gets a new one."""

    def __init__(self, function: Callable[..., Answer]) -> None:
        self._function = function
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def call(self, *arguments: Any, deadline_s: float) -> Answer:
        """What `function` returns or raises; ChildOverdue or ChildDied when it does neither."""
        self.send(*arguments)
        return self.receive(deadline_s)

    def send(self, *arguments: Any) -> None:
        """The first half of a call; others may compute beside it until `receive`."""
        pipe = self._pipe or self.start()
        with suppress(OSError):  # what became of the child `receive` says
            pipe.send(arguments)

    def receive(self, deadline_s: float) -> Answer:
        """The second half."""
        assert self._pipe is not None, "send comes first"
        try:
            if not self._pipe.poll(deadline_s):
                self.kill()
                raise ChildOverdue(f"not done within {deadline_s:g} s")
            answer, error = cast(tuple[Answer, BaseException | None], self._pipe.recv())
        except (EOFError, OSError):
            raise ChildDied(self.kill(EXIT_ALLOWANCE_S)) from None
        if error is not None:
            raise error
        return answer

    def start(self) -> Connection:
        """Have the child ready before its first call."""
        pipe, theirs = SPAWN.Pipe()
        arguments = (theirs, self._function)
        process = SPAWN.Process(target=_serve_calls, args=arguments, name="killable", daemon=True)
        with signals_blocked():
            process.start()
        theirs.close()
        self._process, self._pipe = process, pipe
        if not pipe.poll(START_ALLOWANCE_S):
            self.kill()
            raise CknScaleError(f"a child process did not start within {START_ALLOWANCE_S:g} s")
        try:
            pipe.recv()
        except (EOFError, OSError):
            exit_code = self.kill(EXIT_ALLOWANCE_S)
            raise CknScaleError(f"a child process did not start, it ended with code {exit_code}") from None
        return pipe

    def kill(self, grace_s: float = 0.0) -> int | None:
        """End the child, whatever it does; within `grace_s` it may still end by itself. Its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        pipe.close()
        process.join(grace_s)
        process.kill()
        process.join()
        return process.exitcode

    def __enter__(self) -> KillableChild[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def prepare_killably(
    child: KillableChild[Answer], *arguments: Any, deadline_s: float
) -> Answer | ImageRejected:
    """One image in the child; whatever goes wrong with it is a rejection.

    Running out of memory, and being killed for it by the kernel, say something of the machine: such an
    image is tried once more in a fresh child, and only the second time is it held against the image.
    """
    for is_last in (False, True):
        try:
            return child.call(*arguments, deadline_s=deadline_s)
        except ImageRejected as rejected:
            return rejected
        except ChildOverdue:
            return ImageRejected("timeout", f"not prepared within {deadline_s:g} s")
        except ChildDied as died:
            if died.exit_code != -signal.SIGKILL or is_last:
                return ImageRejected("crashed", _explain_death(died.exit_code))
        except MemoryError:
            child.kill()  # what is left of its memory may be in pieces
            if is_last:
                return ImageRejected("too_large", "preparing it needs more memory than there is, tried twice")
        except Exception as error:  # a bug met by these bytes: the row says which
            return ImageRejected("crashed", f"{type(error).__name__}: {error}")
    raise AssertionError("the last try returns")


def _explain_death(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "its process was killed twice (signal 9), as the kernel does when memory runs out"
    return f"its process ended with code {exit_code}"


def _serve_calls(pipe: Connection, function: Callable[..., Any]) -> None:
    exit_with_parent()
    pipe.send("ready")
    while True:
        try:
            arguments = pipe.recv()
        except (EOFError, OSError):  # whoever asked is gone
            return
        answer: tuple[Any, BaseException | None]
        try:
            answer = (function(*arguments), None)
        except (CknScaleError, MemoryError) as error:
            answer = (None, error)
        except Exception as error:  # others need not survive pickling
            answer = (None, RuntimeError(f"{type(error).__name__}: {error}"))
        pipe.send(answer)


def exit_with_parent(poll_s: float = 1.0) -> None:
    """End this process soon after its parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _empty_main():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def _empty_main() -> Iterator[None]:
    with _swapping:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


SPAWN = _Context()
