"""The driver's loop over an executor that does what the test says: no processes, no clock."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError, CorruptData, RunFailed, RunMismatch, TransientStoreError
from ckn_scale.runners.driver import TaskOutcome, require_done, run_shards
from ckn_scale.runners.worker import ShardReport
from ckn_scale.step import ShardTask
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

STEP = EncodeImages(RunFolder(Store("run"), {"settings": {}}))  # only its name is looked at


class ScriptedExecutor:
    """Ends each try of a shard as scripted; `done` when the script has no more to say."""

    def __init__(self, script=None, places=2):
        self.script, self.places = defaultdict(list, script or {}), places
        self.running, self.seen, self.most = [], [], 0
        self.images_under_way = 0

    @property
    def free(self):
        return self.places - len(self.running)

    def start(self, task):
        assert self.free > 0
        self.running.append(task)
        self.seen.append(task)
        self.most = max(self.most, len(self.running))

    def wait(self, timeout_s, on_image=None):
        task = self.running.pop()
        if not self.script[task.shard_id]:
            return [TaskOutcome(task, "done", ShardReport(3, True, 1.0))]
        kind, error = self.script[task.shard_id].pop(0)
        return [TaskOutcome(task, kind, error=error)]


def run(executor, count=4, total=6, sizes=None, before=0, **resources):
    events, progress = [], []
    report = run_shards(
        executor,
        [ShardTask(STEP, shard) for shard in range(count)],
        label="encode_images",
        total=total,
        resources=Resources(**resources),
        on_progress=progress.append,
        write_event=lambda kind, **fields: events.append((kind, fields)),
        sizes=sizes,
        images_before=before,
    )
    return report, events, progress


def test_run_shards_does_every_task_and_counts_the_skipped():
    executor = ScriptedExecutor()
    report, events, progress = run(executor)
    assert (report.done, report.skipped, report.images, report.failed) == (4, 2, 12, {})
    assert executor.most == 2
    assert events == []
    assert (progress[-1].done, progress[-1].total) == (6, 6)
    require_done(report)


def test_run_shards_tries_a_failed_shard_again_as_it_was():
    executor = ScriptedExecutor({1: [("failed", TransientStoreError("its store hangs"))]})
    report, events, _ = run(executor)
    tries = [task for task in executor.seen if task.shard_id == 1]
    assert [(task.tries, task.isolate) for task in tries] == [(0, False), (1, False)]
    assert (report.done, report.retries) == (4, 1)
    assert events[0][0] == "failed"


@pytest.mark.parametrize("kind", ["lost", "overdue"])
def test_run_shards_isolates_images_after_a_death(kind):
    executor = ScriptedExecutor({2: [(kind, CknScaleError("worker"))]})
    report, _, _ = run(executor)
    assert [task.isolate for task in executor.seen if task.shard_id == 2] == [False, True]
    assert report.done == 4


def test_run_shards_gives_up_after_the_allowed_tries_and_goes_on():
    executor = ScriptedExecutor({0: [("lost", None)] * 9})
    report, _, _ = run(executor, max_attempts=3)
    assert len([task for task in executor.seen if task.shard_id == 0]) == 3
    assert report.done == 3
    assert list(report.failed) == [0]
    with pytest.raises(RunFailed, match="1 of 6 shards failed, the first is 0"):
        require_done(report)


def test_run_shards_does_not_repeat_what_the_user_must_fix():
    executor = ScriptedExecutor({1: [("failed", RunMismatch("other settings"))]})
    report, _, _ = run(executor, count=9)
    assert len([task for task in executor.seen if task.shard_id == 1]) == 1
    assert len(executor.seen) < 9, "what would fail them all is not tried on all"
    assert "other settings" in report.failed[1]


def test_run_shards_does_not_count_a_lost_host_against_the_shard():
    executor = ScriptedExecutor({1: [("node_lost", CknScaleError("node"))] * 7})
    report, events, _ = run(executor, max_attempts=2)
    assert (report.done, report.retries, report.failed) == (4, 7, {})
    assert not any(task.isolate or task.tries for task in executor.seen)
    assert len(events) == 7


def test_require_done_tells_damage_apart():
    executor = ScriptedExecutor({1: [("failed", CorruptData("vectors/1 is damaged"))] * 9})
    report, _, _ = run(executor)
    with pytest.raises(CorruptData, match="vectors/1 is damaged"):
        require_done(report)


def test_run_shards_of_nothing_is_done():
    report, _, _ = run(ScriptedExecutor(), count=0, total=0)
    assert report.done == 0
    require_done(report)


def test_progress_counts_images_of_shards_under_way_and_of_earlier_calls():
    executor = ScriptedExecutor({0: [("failed", CknScaleError("once"))]}, places=1)
    executor.images_under_way = 1
    _, _, progress = run(executor, count=2, total=3, sizes={0: 5, 1: 4}, before=7, max_attempts=2)
    assert [one.images - executor.images_under_way for one in progress] == [7, 11, 16], (
        "a failed try counts none"
    )
    assert {one.total_images for one in progress} == {16}
