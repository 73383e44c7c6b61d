"""Reading a plan: its segments, the images of a shard, and what was drawn from them.

Ids are dense and in sorted-URI order within a segment; shards are cut by the number of images alone.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.kept_columns import ARROW_TYPES
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.stored_files import StoredFile, read_table

SHARDS_PER_FILE = 256
SHARDS_OF_A_SMALL_SET, IMAGES_OF_A_SMALL_SHARD = 64, 4


@dataclass(frozen=True)
class PlannedImage:
    image_id: int
    uri: str
    size_bytes: int
    etag: str


def read_segments(run: RunFolder) -> list[Segment]:
    """The plan, in order. CorruptData when a record is damaged or gone: its ids would be given twice."""
    segments, damage = run.plan.read_all()
    numbers = [segment.number for segment in segments]
    broken = set(range(1, max([*numbers, *damage], default=0) + 1)) - set(numbers)
    if not broken:
        return segments
    what = damage.get(min(broken), f"{run.store.address(run.plan.path(min(broken)))} is gone")
    raise CorruptData(
        f"{what}; the images it planned and their ids are unknown without it, so nothing can be added or "
        f"built: put a copy of it back, or use another run folder (`--models {run.url}` spares learning)"
    )


def require_segments(run: RunFolder) -> list[Segment]:
    """The plan, in order; InputError when there is none."""
    segments = read_segments(run)
    if not segments:
        raise InputError(f"{run.url} has no plan yet: run `ckn-scale plan IMAGES RUN` first")
    return segments


def find_segment(segments: Sequence[Segment], shard_id: int) -> Segment:
    """The segment that a shard is cut from."""
    return next(segment for segment in reversed(segments) if segment.first_shard <= shard_id)


def count_shards(segments: Sequence[Segment]) -> int:
    return sum(segment.num_shards for segment in segments)


def list_replaced(segments: Sequence[Segment]) -> np.ndarray:
    """Sorted ids of images that a later segment has with other content."""
    return np.unique(np.array([one for segment in segments for one in segment.replaced], np.int64))


def shard_size(num_images: int, largest: int) -> int:
    """Images per shard: `largest`, or fewer, so that a small collection keeps many workers busy.

    A function of the images alone, never of the workers: shards and bytes do not depend on who works.
    """
    return min(largest, max(IMAGES_OF_A_SMALL_SHARD, -(-num_images // SHARDS_OF_A_SMALL_SET)))


def hash_uri(seed: int, uri: str) -> int:
    """What images are drawn by: the smallest hashes, the same for any sharding, order and worker count."""
    digest = hashlib.blake2b(
        uri.encode("utf-8", "surrogateescape"), digest_size=8, salt=seed.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def read_images(run: RunFolder, file: StoredFile) -> list[PlannedImage]:
    return list(iter_images(read_table(run.store, file)))


def read_sample(run: RunFolder, segments: Sequence[Segment]) -> list[PlannedImage]:
    """The images everything is learned on: drawn from the first segment, in id order."""
    return read_images(run, segments[0].sample)


def iter_images(table: pa.Table) -> Iterator[PlannedImage]:
    columns = [table.column(name).to_pylist() for name in ("image_id", "uri", "size_bytes", "etag")]
    return (PlannedImage(*row) for row in zip(*columns, strict=True))


def iter_planned(run: RunFolder, segments: Sequence[Segment]) -> Iterator[PlannedImage]:
    """All planned images by URI, then id; one file per segment in memory."""
    streams = (
        (image for file in segment.files for image in iter_images(read_table(run.store, file)))
        for segment in segments
    )
    return heapq.merge(*streams, key=lambda image: (image.uri, image.image_id))


class PlanReader:
    """Reads the images of a shard; keeps the last file, as shards of one worker lie close together."""

    def __init__(self, run: RunFolder, segments: Sequence[Segment]) -> None:
        self.run, self.segments = run, segments
        self._last: tuple[str, pa.Table] | None = None

    def read_shard(self, shard_id: int) -> list[PlannedImage]:
        return list(iter_images(self.read_table(shard_id)))

    def count_images(self, shard_id: int) -> int:
        first, end = find_segment(self.segments, shard_id).ids_of_shard(shard_id)
        return end - first

    def read_table(self, shard_id: int) -> pa.Table:
        """The same rows with the user's kept columns, in the types that they have in the run by now."""
        if shard_id >= count_shards(self.segments):
            self.segments = require_segments(self.run)  # another process has appended since
        segment = find_segment(self.segments, shard_id)
        position = shard_id - segment.first_shard
        table = self._read_file(segment.files[position // SHARDS_PER_FILE])
        table = table.slice((position % SHARDS_PER_FILE) * segment.images_per_shard, segment.images_per_shard)
        for name, kind in self.segments[-1].columns.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, table.column(place).cast(ARROW_TYPES[kind]))
        return table

    def _read_file(self, file: StoredFile) -> pa.Table:
        if self._last is None or self._last[0] != file.path:
            self._last = (file.path, read_table(self.run.store, file))
        return self._last[1]
