"""Ray actors as workers: the executor that spreads them over a cluster, and what each of them does.

Actors count in Ray's own metrics, which appear where the cluster's are scraped:

ckn_scale_shards_total{step, outcome}    ckn_scale_images_total{step}    ckn_scale_shard_seconds{step}
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.metrics import Counter, Histogram

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, InputError, RunFailed
from ckn_scale.ray_cluster import connect_ray
from ckn_scale.runners.driver import OnImage, TaskOutcome
from ckn_scale.runners.worker import Handshake, ShardReport, Worker
from ckn_scale.step import ShardTask
from ckn_scale.storage.run_folder import RunFolder

SHARD_SECONDS = [0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600]
log = logging.getLogger(__name__)
START_ALLOWANCE_S = 600.0  # a cluster may first have to add nodes
COUNT_EVERY_S = 1.0  # how often actors are asked for their images
BESIDE = "beside the work"  # a thread of the actor that answers while a shard is done
SETTLE_S = 60.0  # after which the work begins with the workers that are there
MAX_FAILED_STARTS = 20  # one after the other, before the run says that it cannot work here
NODE_DEATH = "its node has died"  # what Ray says of an actor; there is no class or field for it


class RayExecutor:
    """Joins (`auto`) or starts (`local`, never a stranger's) a cluster and keeps `workers` actors busy.

    An actor that dies is replaced by a new one, which waits for room in the cluster: nodes may go and
    come in the middle.
    """

    def __init__(self, run_url: str, resources: Resources, handshake: Handshake) -> None:
        self._run_url, self._resources, self._handshake = run_url, resources, handshake
        self._needs = count_needs(RunFolder.open(run_url).settings["numerics"], resources)
        self._idle: list[Any] = []
        self._running: dict[Any, _Busy] = {}  # by the result
        self._counted_at = 0.0
        self._starting: dict[Any, Any] = {}  # answer of `ready` → actor
        self._failed_starts = 0  # since the last one that succeeded
        self._connection = contextlib.ExitStack()

    def __enter__(self) -> RayExecutor:
        if not ray.is_initialized():
            address = "auto" if self._resources.ray == "auto" else None
            own_cpus = self._count * round(self._needs["CPU"])
            self._connection.enter_context(connect_ray(address, num_cpus=own_cpus))
        try:
            for _ in range(self._count):
                self._start_actor()
            self._wait_for_first()
        except BaseException:
            self._shut_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down()

    @property
    def free(self) -> int:
        return len(self._idle)

    @property
    def images_under_way(self) -> int:
        return sum(busy.images for busy in self._running.values())

    @property
    def _count(self) -> int:
        return max(self._resources.workers, 1)

    def start(self, task: ShardTask) -> None:
        actor = self._idle.pop()
        self._running[actor.process.remote(task)] = _Busy(actor, task, time.monotonic())

    def wait(self, timeout_s: float, on_image: OnImage = lambda: None) -> list[TaskOutcome]:
        self._count_images()
        answers, _ = ray.wait([*self._running, *self._starting], num_returns=1, timeout=timeout_s)
        outcomes = [self._collect(answer) for answer in answers if answer in self._running]
        for answer in answers:
            if answer in self._starting:
                self._on_ready(answer)
        now, deadline_s = time.monotonic(), self._resources.shard_deadline_s
        overdue = [r for r, busy in self._running.items() if now - busy.since > deadline_s]
        return outcomes + [self._give_up(result) for result in overdue]

    def _count_images(self) -> None:
        """Ask every busy actor now and then, one call each, and never wait for what they answer."""
        if time.monotonic() - self._counted_at < COUNT_EVERY_S:
            return
        asked = {busy.count: busy for busy in self._running.values() if busy.count is not None}
        answers = ray.wait([*asked], num_returns=len(asked), timeout=0)[0] if asked else []
        for answer in answers:
            asked[answer].count = None
            with contextlib.suppress(RayError):  # what became of the actor its shard's result says
                asked[answer].images = ray.get(answer)
        for busy in self._running.values():
            busy.count = busy.count or busy.actor.count_images.remote()
        self._counted_at = time.monotonic()

    def _collect(self, result: Any) -> TaskOutcome:
        busy = self._running.pop(result)
        actor, task = busy.actor, busy.task
        try:
            report = ray.get(result)
        except RayTaskError as error:
            self._idle.append(actor)
            return TaskOutcome(task, "failed", error=as_ours(error))
        except RayError as error:
            self._replace(actor)
            kind: Literal["lost", "node_lost"] = "node_lost" if _is_of_the_host(error) else "lost"
            return TaskOutcome(task, kind, error=CknScaleError(f"its actor died: {_shorten(error)}"))
        self._idle.append(actor)
        return TaskOutcome(task, "done", report)

    def _give_up(self, result: Any) -> TaskOutcome:
        busy = self._running.pop(result)
        self._replace(busy.actor)
        return TaskOutcome(busy.task, "overdue", error=CknScaleError("its actor was killed at the deadline"))

    def _on_ready(self, answer: Any) -> None:
        actor = self._starting.pop(answer)
        try:
            node = ray.get(answer)
        except RayError as error:
            ours = as_ours(error)
            if isinstance(ours, InputError):  # no other actor would do better
                raise ours from None
            self._failed_starts += not _is_of_the_host(error)
            if self._failed_starts > MAX_FAILED_STARTS:
                raise RunFailed(f"workers do not start: {ours}") from None
            log.warning("an actor did not start: %s", ours)
            self._replace(actor)
            return
        log.info("an actor is ready on node %s", node)
        self._failed_starts = 0
        self._idle.append(actor)

    def _replace(self, actor: Any) -> None:
        ray.kill(actor)  # it may be alive behind a broken connection; its records would do no harm
        self._start_actor()

    def _start_actor(self) -> None:
        maker = ray.remote(concurrency_groups={BESIDE: 1})(ShardActor).options(
            num_cpus=self._needs["CPU"],
            num_gpus=self._needs.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        actor = maker.remote(self._run_url, self._resources, self._handshake)
        self._starting[actor.ready.remote()] = actor

    def _wait_for_first(self) -> None:
        """Until all that find room are there; after a while, those that are there begin. Others join them."""
        begun, room = time.monotonic(), count_room(ray.nodes(), self._needs)
        if room < self._count:
            log.warning("%s; those without begin when there is more", self._describe_room(room))
        while self._starting:
            self.wait(timeout_s=1.0)
            waited_s = time.monotonic() - begun
            if 0 < room <= len(self._idle):
                return
            if self._idle and waited_s > SETTLE_S:
                log.warning("%d of %d workers begin", len(self._idle), self._count)
                return
            if waited_s > START_ALLOWANCE_S:
                room = count_room(ray.nodes(), self._needs)
                raise InputError(f"no worker started in {START_ALLOWANCE_S:g} s: {self._describe_room(room)}")

    def _describe_room(self, room: int) -> str:
        nodes = ", ".join(_list_amounts(node["Resources"]) for node in ray.nodes() if node["Alive"])
        return (
            f"{self._count} workers ask for {_list_amounts(self._needs)} each, "
            f"and the cluster's nodes ({nodes}) have room for {room}"
        )

    def _shut_down(self) -> None:
        busy = [one.actor for one in self._running.values()]
        for actor in (*self._idle, *busy, *self._starting.values()):
            ray.kill(actor)
        self._connection.close()


@dataclass
class _Busy:
    """An actor with a task, and how far it is."""

    actor: Any
    task: ShardTask
    since: float
    images: int = 0
    count: Any = None  # the answer of `count_images` that is on its way


class ShardActor:
    """A worker on some node of the cluster. It opens the run in `ready`, whose error reaches the driver."""

    def __init__(self, run_url: str, resources: Resources, handshake: Handshake) -> None:
        self._arguments = (run_url, resources, handshake)
        self._worker: Worker | None = None
        self._metrics = ShardMetrics()
        self._images = 0  # of the shard under way

    def ready(self) -> str:
        self._worker = Worker(*self._arguments, on_image=self._count_image)
        return str(ray.get_runtime_context().get_node_id())

    def process(self, task: ShardTask) -> ShardReport:
        assert self._worker is not None, "ready comes first"
        try:
            report = self._worker.process(task)
        except Exception:
            self._metrics.count_failed(task.step.name)
            raise
        finally:
            self._images = 0
        self._metrics.count_done(task.step.name, report)
        return report

    @ray.method(concurrency_group=BESIDE)  # type: ignore[untyped-decorator, unused-ignore]
    def count_images(self) -> int:
        """Answered while a shard is done."""
        return self._images

    def _count_image(self) -> None:
        self._images += 1


class ShardMetrics:
    """Counts what one actor does."""

    def __init__(self) -> None:
        self._shards = Counter("ckn_scale_shards_total", "Shards by outcome.", ("step", "outcome"))
        self._images = Counter("ckn_scale_images_total", "Images in finished shards.", ("step",))
        self._seconds = Histogram("ckn_scale_shard_seconds", "Time of a shard.", SHARD_SECONDS, ("step",))

    def count_done(self, step: str, report: ShardReport) -> None:
        outcome = "done" if report.worked else "found_done"
        self._shards.inc(1, {"step": step, "outcome": outcome})
        if report.worked:
            self._seconds.observe(max(report.seconds, 1e-3), {"step": step})
        if report.worked and report.images:
            self._images.inc(report.images, {"step": step})

    def count_failed(self, step: str) -> None:
        self._shards.inc(1, {"step": step, "outcome": "failed"})


def count_needs(numerics: Mapping[str, Any], resources: Resources) -> dict[str, float]:
    """What one worker is busy with, in Ray's words.

    On the CPU the compute threads: those that read and decode ahead mostly wait for them. On a GPU it is
    the other way round, and the worker wants a core for each.
    """
    if numerics["device"] == "cpu":
        return {"CPU": numerics["threads"]}
    return {"CPU": numerics["threads"] + resources.read_ahead, "GPU": resources.gpus_per_worker}


def count_room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    """How many workers the nodes could hold at once, were nobody else there."""
    having = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(int(min(has.get(name, 0) / amount for name, amount in needs.items())) for has in having)


def _list_amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in resources)


def as_ours(error: RayError) -> CknScaleError:
    """The error that our code raised in the actor; others in one line."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, CknScaleError) else CknScaleError(_shorten(cause))


def _is_of_the_host(error: RayError) -> bool:
    """Whether the host went away: Ray says so, or has lost the connection and does not know more yet."""
    return isinstance(error, ActorUnavailableError) or NODE_DEATH in str(error)


def _shorten(error: BaseException) -> str:
    """Ray's messages without their tables and guesses: the first line, and the reason after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    said = " ".join(lines).partition(" Some common causes")[0]
    return f"{type(error).__name__}: {said[:300]}"
