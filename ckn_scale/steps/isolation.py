"""One image at a time in a subprocess that can be killed: for shards that crashed or hung before.

The child prepares images (read, decode, detect, extract). One that kills it gets the state
`crashed`, one that misses the deadline `timeout`; the next image gets a new child.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.errors import CknScaleError, ImageRejected
from ckn_scale.steps.plan import PlannedImage
from ckn_scale.steps.prepare_image import prepare_image

START_ALLOWANCE_S = 120.0  # a child imports numpy and OpenCV before its first image


class IsolatedPreparer:
    def __init__(self, front: Front, deadline_s: float) -> None:
        self.front, self.deadline_s = front, deadline_s
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> IsolatedPreparer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_child()

    def prepare(self, image: PlannedImage) -> PreparedImage | ImageRejected:
        child, pipe = self._child or self._start_child()
        pipe.send(image)
        if not pipe.poll(self.deadline_s):
            self._end_child()
            return ImageRejected("timeout", f"not prepared within {self.deadline_s:g} s")
        try:
            outcome = pipe.recv()
        except EOFError:
            child.join()
            self._end_child()
            return ImageRejected("crashed", f"its process ended with code {child.exitcode}")
        if isinstance(outcome, CknScaleError) and not isinstance(outcome, ImageRejected):
            raise outcome
        return outcome

    def _start_child(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        child = context.Process(target=_serve_images, args=(theirs, self.front), name="isolated-image")
        child.start()
        theirs.close()
        self._child = (child, mine)
        if not mine.poll(START_ALLOWANCE_S) or mine.recv() != "ready":
            raise CknScaleError("a subprocess for one image did not start")
        return self._child

    def _end_child(self) -> None:
        if self._child is not None:
            child, pipe = self._child
            child.kill()
            child.join()
            pipe.close()
            self._child = None


def _serve_images(pipe: Connection, front: Front) -> None:
    exit_with_parent()
    pipe.send("ready")
    while True:
        try:
            image = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(prepare_image(image, front))
        except CknScaleError as error:
            pipe.send(error)
        except Exception as error:  # a bug met by these bytes: the row says which
            pipe.send(ImageRejected("crashed", f"{type(error).__name__}: {error}"))


def exit_with_parent(poll_s: float = 1.0) -> None:
    """End this process soon after its parent is gone, whatever it is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
