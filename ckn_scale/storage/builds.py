"""Names of what the committed vectors make: of the build, and of each of its index shards.

An index shard is named by its own content, so one that did not change is taken over by the next
build as it is. Records are all that is read here (no torch: `status` asks too).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from ckn_scale.errors import RunFailed
from ckn_scale.storage.plans import count_shards, find_segment, list_replaced
from ckn_scale.storage.run_folder import DESCRIPTORS_STAGE, THUMBNAILS_STAGE, VECTORS_STAGE, RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.shards import Commit

_CONTENTS = 10**12  # an index shard's number: its position, then twelve digits of its content's hash


def name_build(run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit]) -> str:
    """The name of the build that the vectors of a plan make; RunFailed while some are missing."""
    return name_shards(number_index_shards(run, segments, encoded))


def name_shards(numbers: Sequence[int]) -> str:
    """The name of the build that index shards of these numbers make."""
    return hashlib.sha256("".join(f"{number}\n" for number in numbers).encode()).hexdigest()[:16]


def number_index_shards(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit]
) -> list[int]:
    """The numbers of the index shards that encoded shards make, by position; RunFailed while some miss."""
    replaced, total = list_replaced(segments), count_shards(segments)
    missing = sum(shard_id not in encoded for shard_id in range(total))
    if missing:
        raise RunFailed(f"{run.url}: {missing} of {total} shards are not encoded yet")
    size = int(run.settings["index"]["shards_per_index_shard"])
    return [
        number_index_shard(
            first // size,
            [encoded[one] for one in range(first, min(first + size, total))],
            segments,
            replaced,
        )
        for first in range(0, total, size)
    ]


def number_index_shard(
    position: int, covered: Sequence[Commit], segments: Sequence[Segment], replaced: np.ndarray
) -> int:
    """Of one index shard, by what it is made of: vectors, points, thumbnails, and what was replaced."""
    content = hashlib.sha256()
    for commit in covered:
        stages = (VECTORS_STAGE, DESCRIPTORS_STAGE, THUMBNAILS_STAGE)
        files = " ".join(commit.files[stage].sha256 for stage in stages)
        content.update(f"{commit.shard_id} {commit.fingerprint} {files}\n".encode())
    first, _ = _ids_of_shard(segments, covered[0].shard_id)
    _, end = _ids_of_shard(segments, covered[-1].shard_id)
    content.update(replaced[slice(*np.searchsorted(replaced, (first, end)))].tobytes())
    return position * _CONTENTS + int.from_bytes(content.digest()[:8], "big") % _CONTENTS


def _ids_of_shard(segments: Sequence[Segment], shard_id: int) -> tuple[int, int]:
    return find_segment(segments, shard_id).ids_of_shard(shard_id)


def position_of(number: int) -> int:
    """The position of an index shard among those of its build."""
    return number // _CONTENTS
