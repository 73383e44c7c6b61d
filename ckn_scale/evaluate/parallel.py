"""Describe many images with several processes; the cache is where they leave their results."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from ckn_scale.core.descriptors.catalogue import load_descriptor
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.evaluate.regions import (
    ImageFile,
    KeyedDescriptor,
    RegionReader,
    describe_regions,
    name_descriptors,
)
from ckn_scale.evaluate.training_images import Progress
from ckn_scale.interrupts import signals_blocked
from ckn_scale.processes import SPAWN

FILES_PER_TASK = 8
MIN_FILES = 64  # below this, starting processes costs more than it saves


def describe_files(
    files: Sequence[ImageFile],
    reader: RegionReader,
    keyed: KeyedDescriptor,
    what: str,
    on_progress: Progress,
    *,
    workers: int = 1,
) -> float:
    """Bring the descriptors of all files into the cache; the seconds of describing, over all processes."""
    missing = [file for file in files if not reader.cache.has(name_descriptors(reader, file, keyed))]
    if workers > 1 and len(missing) >= MIN_FILES:
        for done in _describe_in_processes(missing, reader, keyed, workers):
            on_progress(what, done, len(missing))
    seconds = 0.0
    for done, file in enumerate(files):
        seconds += describe_regions(reader, file, keyed)[1]
        on_progress(what, done + 1, len(files))
    return seconds


def _describe_in_processes(
    files: Sequence[ImageFile], reader: RegionReader, keyed: KeyedDescriptor, workers: int
) -> Iterator[int]:
    """Yields how many are done; spawned, because torch's threads do not survive a fork."""
    packed, done = (keyed.descriptor.to_part(), keyed.options), 0
    tasks = [files[start : start + FILES_PER_TASK] for start in range(0, len(files), FILES_PER_TASK)]
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(workers, len(tasks)), SPAWN, _set_up, (reader, keyed.key, *packed)) as pool:
        try:
            with signals_blocked():
                futures = [pool.submit(_describe_task, task) for task in tasks]
            for future in as_completed(futures):
                done += future.result()
                yield done
        except BaseException:  # Ctrl-C, say: what was asked for is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


_WORK: dict[str, Any] = {}  # of one worker process


def _set_up(reader: RegionReader, key: str, part: ModelPart, options: Mapping[str, Any]) -> None:
    set_compute_threads(1)
    _WORK["reader"], _WORK["keyed"] = reader, KeyedDescriptor(load_descriptor(part, **options), key)


def _describe_task(files: Sequence[ImageFile]) -> int:
    for file in files:
        describe_regions(_WORK["reader"], file, _WORK["keyed"])
    return len(files)
