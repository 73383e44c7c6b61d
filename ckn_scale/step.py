"""A step turns stage into stage, one shard at a time; `process_shard` is the one way to do a shard.

The local loop, the process pool, the Ray actor, retries and tests all call `process_shard`. A
runner chooses who and when, never what. A shard is done only with the arithmetic that the run is
computed with (`require_same_arithmetic`), and counts only with the fingerprint of its step.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from ckn_scale.config import Settings, parse_settings
from ckn_scale.core.numerics import Arithmetic, find_arithmetic
from ckn_scale.errors import RunMismatch
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Numerics
from ckn_scale.storage.shards import Commit, ShardLog
from ckn_scale.storage.stored_files import StoredFile, find_damage


@dataclass(frozen=True)
class ShardResult:
    """What a shard came to: tables to write, files already written, and counts for the record."""

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSettings:
    """How this worker works; none of it changes a byte."""

    read_ahead: int = 4
    read_deadline_s: float = 300.0
    image_memory_bytes: int = 1 << 30  # of images that are read and decoded ahead
    isolate: bool = False  # each image in a subprocess that can be killed
    check: bool = False  # a committed shard is read, and rebuilt where it is damaged
    on_image: Callable[[], None] = lambda: None  # called when one more image of the shard is done


@dataclass(frozen=True, eq=False)
class Step(ABC):
    """One arrow of the pipeline over one run folder; the fields of a subclass distinguish its uses.

    A step is data: it travels to workers pickled, without what it has read, and is opened there on the
    run that the worker sees.
    """

    run: RunFolder

    name: ClassVar[str]
    version: ClassVar[int] = 1  # raise it when the output changes for the same input
    sections: ClassVar[tuple[str, ...]]  # the settings this step's output depends on
    label_fields: ClassVar[tuple[str, ...]] = ()  # the fields that its records are filed by

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.run, *self.arguments))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The values of its fields, without the run."""
        return tuple(getattr(self, one.name) for one in fields(self) if one.name != "run")

    def is_same_as(self, other: Step) -> bool:
        return type(self) is type(other) and self.arguments == other.arguments

    @cached_property
    def settings(self) -> Settings:
        return parse_settings(self.run.settings)

    @property
    def label(self) -> str:
        """What its records are filed under: `encode_images`, `train_layer-1`."""
        return "-".join([self.name, *(str(getattr(self, name)) for name in self.label_fields)])

    @property
    def log(self) -> ShardLog:
        return self.run.commits(self.label)

    @abstractmethod
    def shard_ids(self) -> Sequence[int]:
        """Every shard of this step, known before the first one starts."""

    def num_images(self, shard_id: int) -> int:
        """How many images a shard goes through, for progress; 0 when its work is not counted in images."""
        return 0

    @abstractmethod
    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        """Read the input of one shard and compute its output."""

    def inputs(self) -> Mapping[str, Any]:
        """What the output depends on besides the settings, as JSON: hashes of models, say."""
        return {}

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """What this process computes with; RunMismatch when the run does with another."""
        return require_same_arithmetic(self.run, self.settings.numerics.device)

    @cached_property
    def fingerprint(self) -> str:
        # As recorded, not as this release would write them: a setting that later releases add, whose default
        # is what was done before, leaves the results of older ones valid.
        recorded = self.run.settings
        settings = {name: recorded[name] for name in {"numerics", *self.sections} if name in recorded}
        payload = {"step": self.label, "version": self.version, "settings": settings, "inputs": self.inputs()}
        return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ShardTask:
    """One shard for one worker: which step of which run, and how; never its data."""

    step: Step
    shard_id: int
    tries: int = 0
    moves: int = 0  # how often its host went away, which is not held against it
    isolate: bool = False
    redo: str | None = None  # why a shard that is committed is done once more
    check: bool = False  # read what is committed, and rebuild it where it is damaged


def process_shard(step: Step, shard_id: int, worker: WorkerSettings | None = None) -> tuple[Commit, bool]:
    """Read → apply → write → commit. Returns what is committed, and whether this call did the work.

    RunMismatch when other settings, code or arithmetic made what is committed.
    """
    worker = worker or WorkerSettings()
    committed = step.log.get(shard_id)
    if committed is None:
        return _do_shard(step, shard_id, worker, None, None), True
    check_fingerprint(step, committed)
    damage = find_damage(step.run.store, committed.files.values()) if worker.check else None
    if damage is not None:
        return redo_shard(step, committed, damage, worker), True
    return committed, False


def redo_shard(step: Step, committed: Commit, reason: str, worker: WorkerSettings | None = None) -> Commit:
    """The next generation of a shard: a retry of failures or the repair of damage."""
    check_fingerprint(step, committed)
    return _do_shard(step, committed.shard_id, worker or WorkerSettings(), committed, reason)


def _do_shard(
    step: Step, shard_id: int, worker: WorkerSettings, before: Commit | None, reason: str | None
) -> Commit:
    arithmetic = step.arithmetic
    attempt, started_at = new_attempt(), time.time()
    result = step.apply(shard_id, attempt, worker)
    files = {
        stage: step.run.write_table(stage, shard_id, attempt, table) for stage, table in result.tables.items()
    }
    hit_failpoint("data_written", step.name, shard_id)
    mine = Commit(
        step=step.label,
        shard_id=shard_id,
        generation=1 if before is None else before.generation + 1,
        attempt=attempt,
        fingerprint=step.fingerprint,
        files={**result.files, **files},
        states=dict(result.states),
        worker={**describe_worker(step.settings.numerics.device), "arithmetic": str(arithmetic)},
        seconds=round(time.time() - started_at, 3),
        started_at=started_at,
        report=dict(result.report),
        supersedes=None if before is None else before.generation,
        reason=reason,
    )
    committed, _ = step.log.commit(mine)
    hit_failpoint("recorded", step.name, shard_id)
    check_fingerprint(step, committed)  # lost to another process: it may run other code
    return committed


def check_fingerprint(step: Step, commit: Commit) -> None:
    """RunMismatch when a shard was made by other settings, inputs or another version of the step."""
    if commit.fingerprint != step.fingerprint:
        raise RunMismatch(
            f"{step.run.url}: {step.name} shard {commit.shard_id} was made by other settings, models, "
            f"numerics or another release of ckn_scale (here its algorithm has version {step.version}), on "
            f"host {commit.worker.get('host')}: their results do not mix; use another run folder"
        )


def describe_worker(device: str) -> dict[str, Any]:
    """Who did it, for the record."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def require_same_arithmetic(run: RunFolder, device: str) -> Arithmetic:
    """What this process computes with; RunMismatch when the run's results come from another arithmetic."""
    mine = find_arithmetic(device)
    records = run.numerics.all()
    if not any(one.arithmetic for one in records):
        offered = Numerics(run.numerics.next_number(), socket.gethostname(), asdict(mine))
        records.append(run.numerics.create(offered).record)
    if not any(one.mix or one.arithmetic == asdict(mine) for one in records):
        first = next(one for one in records if one.arithmetic)
        theirs, here = Arithmetic(**(first.arithmetic or {})), socket.gethostname()
        raise RunMismatch(
            f"{run.url} was computed with {theirs} on host {first.host}, and host {here} computes with "
            f"{mine}: their bytes differ. Use workers of one kind of CPU and one set of libraries "
            "(ATEN_CPU_CAPABILITY=avx2 makes torch use less than a CPU has), or let them mix, on record, "
            "with `ckn-scale index --allow-mix`"
        )
    return mine


def allow_mix(run: RunFolder) -> None:
    """From now on any arithmetic may work on the run; its bytes are then those of no single kind."""
    if not any(one.mix for one in run.numerics.all()):
        run.numerics.append(Numerics(0, socket.gethostname(), None, mix=True))
