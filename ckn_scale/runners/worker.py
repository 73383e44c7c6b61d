"""A worker: one process that does shards of one run, whoever hands them out.

Before it works it proves that it sees what the driver sees (the handshake): a fresh secret in the run
folder, and one image.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ckn_scale.config import Resources
from ckn_scale.core.numerics import require_device, set_compute_threads
from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.step import ShardTask, Step, WorkerSettings, process_shard, redo_shard
from ckn_scale.storage.http_images import is_http
from ckn_scale.storage.image_sources import image_exists, read_image
from ckn_scale.storage.plans import PlanReader, require_segments
from ckn_scale.storage.run_folder import RunFolder, is_run

IMAGES_TRIED = 10  # of the first shard: images may have been removed since the plan


class Handshake(NamedTuple):
    """What a worker has to read back before it works."""

    nonce: str
    image_uri: str  # empty: the driver sees none itself


class ShardReport(NamedTuple):
    """What a worker says of a shard that is committed."""

    images: int  # that it holds
    worked: bool  # False: it was committed already
    seconds: float


class Worker:
    """Opens the run once, keeps the step (and its models) it worked on last.

    InputError when this process sees another run or no images, MissingDependency without the device.
    """

    def __init__(
        self,
        run_url: str,
        resources: Resources,
        handshake: Handshake,
        on_image: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = open_with_handshake(run_url, handshake)
        self.settings = WorkerSettings(
            read_ahead=resources.read_ahead,
            read_deadline_s=resources.read_deadline_s,
            image_memory_bytes=resources.image_memory_mb << 20,
            on_image=on_image,
        )
        self._step: Step | None = None
        numerics = self.run.settings["numerics"]
        require_device(numerics["device"])
        set_compute_threads(numerics["threads"])

    def process(self, task: ShardTask) -> ShardReport:
        """Do one shard, or find it done."""
        step = self._open(task.step)
        worker = replace(self.settings, isolate=task.isolate, check=task.check)
        try:
            committed = step.log.get(task.shard_id) if task.redo is not None else None
            if committed is not None:
                commit, worked = redo_shard(step, committed, str(task.redo), worker), True
            else:
                commit, worked = process_shard(step, task.shard_id, worker)
        except BaseException:
            self._step = None  # what it read before may be what failed it
            raise
        return ShardReport(sum(commit.states.values()), worked, commit.seconds)

    def _open(self, step: Step) -> Step:
        """The step with what it has read so far, where it is the one of the task before."""
        if self._step is None or not self._step.is_same_as(step):
            self._step = replace(step, run=self.run)
        return self._step


@contextmanager
def offer_handshake(run: RunFolder) -> Iterator[Handshake]:
    """Put a secret into the run for workers to read back, as long as new workers may start."""
    images = PlanReader(run, require_segments(run)).read_shard(0)
    nonce = run.write_nonce()
    try:
        # Not on the web: what a host there answers one worker says nothing about another.
        stored = (image.uri for image in images[:IMAGES_TRIED] if not is_http(image.uri))
        yield Handshake(nonce, next((uri for uri in stored if image_exists(uri)), ""))
    finally:
        run.remove_nonce(nonce)


def open_with_handshake(run_url: str, handshake: Handshake) -> RunFolder:
    """The run; InputError, naming host and path, unless this process sees the driver's run and images."""
    host = socket.gethostname()
    if not is_run(run_url):
        raise InputError(
            f"host {host} does not see the run at {run_url}: use a folder that all hosts share, or s3://"
        )
    run = RunFolder.open(run_url)
    run.check_nonce(handshake.nonce)
    try:
        if handshake.image_uri:
            read_image(handshake.image_uri)
    except ImageRejected as rejected:
        if rejected.state == "missing":
            raise InputError(
                f"host {host} does not see the image {handshake.image_uri}: "
                "all workers must be able to read it"
            ) from None
    return run
