"""Images that are dead: deleted by a record of deletions, or replaced by a later segment of the plan.

An id keeps its meaning for ever: its row of the plan stays, and no other image gets it. Index shards are
never altered either; a version names the dead images that its shards still hold (its tombstones), and a
purge is a build without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckn_scale.errors import CorruptData
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.schemas import DEAD_STATES
from ckn_scale.storage.index_files import IndexShard, read_ids, write_ids
from ckn_scale.storage.plans import find_segment, list_replaced
from ckn_scale.storage.records import map_in_threads, new_attempt
from ckn_scale.storage.run_folder import VECTORS_STAGE, RunFolder
from ckn_scale.storage.run_records import Deletion, Purge, Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import read_table

BY_USER, BY_SYNC = "user", "sync"
NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class DeadImages:
    """Sorted ids, each in one of the two."""

    deleted: np.ndarray
    replaced: np.ndarray

    @cached_property
    def ids(self) -> np.ndarray:
        return np.union1d(self.deleted, self.replaced)

    def of_range(self, first: int, end: int) -> DeadImages:
        """Those from `first` on, below `end`."""
        return DeadImages(
            *(ids[slice(*np.searchsorted(ids, (first, end)))] for ids in (self.deleted, self.replaced))
        )

    def by_state(self) -> list[tuple[str, np.ndarray]]:
        return list(zip(DEAD_STATES, (self.deleted, self.replaced), strict=True))


NO_DEAD = DeadImages(NO_IDS, NO_IDS)


def record_deletion(run: RunFolder, ids: np.ndarray, why: str) -> int:
    """Delete images from all later versions; the number of the record."""
    file = write_ids(run.store, run.deleted_path(new_attempt()), np.unique(ids))
    hit_failpoint("data_written", "delete", run.deletions.next_number())
    number = run.deletions.append(Deletion(0, why, file))
    hit_failpoint("recorded", "delete", number)
    return number


def read_deletions(run: RunFolder) -> list[Deletion]:
    """In order. CorruptData when one is damaged or gone: what it deleted would come back."""
    records, damage = run.deletions.read_all()
    numbers = {record.number for record in records}
    broken = set(range(1, max([*numbers, *damage], default=0) + 1)) - numbers
    if not broken:
        return records
    path = run.store.address(run.deletions.path(min(broken)))
    raise CorruptData(
        f"{damage.get(min(broken), f'{path} is gone')}; without it images that were deleted would come back, "
        "so nothing is published: put a copy of it back"
    )


def list_deleted(run: RunFolder, records: Iterable[Deletion]) -> np.ndarray:
    """The sorted ids that some records delete."""
    parts = map_in_threads(lambda record: read_ids(run.store, record.ids), records)
    return np.unique(np.concatenate([NO_IDS, *parts]))


def find_dead(run: RunFolder, segments: Sequence[Segment], records: Iterable[Deletion]) -> DeadImages:
    """What is dead for a version of these segments and deletions."""
    deleted = list_deleted(run, records)
    return DeadImages(deleted, np.setdiff1d(list_replaced(segments), deleted))


def find_purged(run: RunFolder, segments: Sequence[Segment], purge: Purge | None) -> DeadImages:
    """What a purge leaves nothing of."""
    if purge is None:
        return NO_DEAD
    records = [one for one in read_deletions(run) if one.number <= purge.deletions]
    return find_dead(run, segments[: purge.segments], records)


def find_tombstones(store: Store, shards: Sequence[IndexShard], dead: np.ndarray) -> np.ndarray:
    """Of dead ids, sorted, those that index shards still hold; only shards that may are looked into."""
    suspects = [(shard, ids) for shard in shards if len(ids := shard.ids_within(dead))]
    held = map_in_threads(lambda one: np.intersect1d(one[1], read_ids(store, one[0].ids)), suspects)
    return np.unique(np.concatenate([NO_IDS, *held]))


def adjust_states(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit], dead: DeadImages
) -> dict[int, dict[str, int]]:
    """The states of encoded shards that hold dead images, these counted as deleted or replaced."""
    adjusted = {}
    for shard_id in find_shards(segments, dead.ids):
        if shard_id in encoded:
            states = Counter(encoded[shard_id].states)
            here = dead.of_range(*find_segment(segments, shard_id).ids_of_shard(shard_id))
            for state, ids in here.by_state():
                states.subtract(look_up_states(run.store, encoded[shard_id], ids).values())
                states[state] += len(ids)
            adjusted[shard_id] = {state: count for state, count in sorted(states.items()) if count}
    return adjusted


def look_up_states(store: Store, commit: Commit, ids: np.ndarray) -> dict[int, str]:
    """The state in which a shard of `encode_images` committed each of these images of it."""
    not_ok = commit.report.get("not_ok")
    if not_ok is None and set(commit.states) - {"ok"}:  # by a release that did not record them
        table = read_table(store, commit.files[VECTORS_STAGE], columns=["image_id", "state"])
        known = dict(zip(*(table.column(name).to_pylist() for name in ("image_id", "state")), strict=True))
    else:
        known = {image_id: state for state, failed in (not_ok or {}).items() for image_id in failed}
    return {image_id: known.get(image_id, "ok") for image_id in ids.tolist()}


def find_shards(segments: Sequence[Segment], ids: np.ndarray) -> list[int]:
    """The encoded shards that sorted ids belong to."""
    found: set[int] = set()
    for segment in segments:
        here = ids[slice(*np.searchsorted(ids, (segment.first_id, segment.next_id)))]
        found.update((segment.first_shard + (here - segment.first_id) // segment.images_per_shard).tolist())
    return sorted(found)
