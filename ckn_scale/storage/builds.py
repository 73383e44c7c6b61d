"""Names of what the committed vectors make: of the build, and of each of its index shards.

An index shard is named by its own content, so one that did not change is taken over by the next
build as it is. Shards are cut within a segment of the plan, so an append leaves those before it as they
are; a purge joins small ones. Records are all that is read here (no torch: `status` asks too).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ckn_scale.errors import RunFailed
from ckn_scale.storage.plans import count_shards
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Purge, Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

_CONTENTS = 10**12  # an index shard's number: its position, then twelve digits of its content's hash


def name_build(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit], purge: Purge | None
) -> str:
    """The name of the build that the vectors of a plan make; RunFailed while some are missing."""
    return name_shards(number_index_shards(run, segments, encoded, purge))


def name_shards(numbers: Sequence[int]) -> str:
    """The name of the build that index shards of these numbers make."""
    return hashlib.sha256("".join(f"{number}\n" for number in numbers).encode()).hexdigest()[:16]


def cut_index_shards(run: RunFolder, segments: Sequence[Segment], purge: Purge | None) -> list[range]:
    """The encoded shards that each index shard is made of, by position."""
    size = int(run.settings["index"]["shards_per_index_shard"])
    cut: list[range] = []
    if purge is not None:
        cut += [range(*ends) for ends in pairwise([*purge.first_shards, purge.next_shard])]
    for segment in segments[purge.segments if purge else 0 :]:
        firsts = range(segment.first_shard, segment.next_shard, size)
        cut += [range(first, min(first + size, segment.next_shard)) for first in firsts]
    return cut


def count_neighbouring_shards(run: RunFolder, segments: Sequence[Segment], purge: Purge | None) -> list[int]:
    """For each index shard how many there are up to the end of its segment, or of what a purge joined."""
    joined = purge.next_shard if purge else 0
    ends = [segment.next_shard for segment in segments if segment.next_shard >= joined]
    firsts = [shards.start for shards in cut_index_shards(run, segments, purge)]
    return [bisect_left(firsts, ends[bisect_right(ends, first)]) for first in firsts]


def number_index_shards(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit], purge: Purge | None
) -> list[int]:
    """The numbers of the index shards that encoded shards make, by position; RunFailed while some miss."""
    total = count_shards(segments)
    missing = sum(shard_id not in encoded for shard_id in range(total))
    if missing:
        raise RunFailed(f"{run.url}: {missing} of {total} shards are not encoded yet")
    return [
        number_index_shard(position, [encoded[one] for one in shards])
        for position, shards in enumerate(cut_index_shards(run, segments, purge))
    ]


def number_index_shard(position: int, covered: Sequence[Commit]) -> int:
    """Of one index shard, by what it is made of: vectors, points and thumbnails."""
    content = hashlib.sha256()
    for commit in covered:
        files = " ".join(file.sha256 for _, file in sorted(commit.files.items()))
        content.update(f"{commit.shard_id} {commit.fingerprint} {files}\n".encode())
    return position * _CONTENTS + int.from_bytes(content.digest()[:8], "big") % _CONTENTS


def number_rows(position: int, rows: StoredFile) -> int:
    """Of one index shard, by the bytes of its rows."""
    return position * _CONTENTS + int(rows.sha256[:16], 16) % _CONTENTS


def position_of(number: int) -> int:
    """The position of an index shard among those of its build."""
    return number // _CONTENTS
