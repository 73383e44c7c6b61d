"""A worker: one process that does shards. The same in a loop, in a pool and as a Ray actor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckn_scale.config import Resources
from ckn_scale.core.threads import require_device, set_compute_threads
from ckn_scale.runners.base import ShardTask
from ckn_scale.runners.sight import Sight, open_seen
from ckn_scale.steps.base import Step, WorkerSettings, process_shard, redo_shard
from ckn_scale.steps.pipeline import STEPS


class Worker:
    """Opens the run once, keeps the step (and its models) it worked on last."""

    def __init__(
        self,
        run_url: str,
        resources: Resources,
        sight: Sight,
        on_image: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = open_seen(run_url, sight)
        self.settings = WorkerSettings(
            read_ahead=resources.read_ahead,
            read_deadline_s=resources.read_deadline_s,
            image_memory_bytes=resources.image_memory_mb << 20,
            on_image=on_image,
        )
        self._key = ""
        self._step: Step | None = None
        numerics = self.run.settings["numerics"]
        require_device(numerics["device"])
        set_compute_threads(numerics["threads"])

    def process(self, task: ShardTask) -> dict[str, Any]:
        """Do one shard; the report says how many images it held and who is known to have done it."""
        try:
            return self._process(task)
        except BaseException:
            self._step = None  # what it read before may be what failed it
            raise

    def _process(self, task: ShardTask) -> dict[str, Any]:
        step = self._open(task.step, task.params)
        worker = replace(self.settings, isolate=task.isolate, check=task.check)
        standing = step.log.get(task.shard_id) if task.redo is not None else None
        if standing is not None:
            commit, worked = redo_shard(step, standing, str(task.redo), worker), True
        else:
            commit, worked = process_shard(step, task.shard_id, worker)
        return {"images": sum(commit.states.values()), "worked": worked, "seconds": commit.seconds}

    def _open(self, name: str, params: Mapping[str, str]) -> Step:
        key = json.dumps([name, dict(params)], sort_keys=True)
        if self._step is None or self._key != key:
            self._key, self._step = key, STEPS[name](self.run, params)
        return self._step
