"""Delete images: a record of their ids, and the next version, which is the current one without them.

Nothing is rebuilt or asked: index shards stay as they are, and the version's tombstones say which of their
rows are in no answer any more. `ckn-scale purge` removes what is left of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import CorruptData, InputError, RunFailed
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.storage.deletions import (
    BY_USER,
    DeadImages,
    find_dead,
    find_shards,
    find_tombstones,
    look_up_states,
    read_deletions,
    record_deletion,
)
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.index_files import read_ids, read_manifest, write_manifest, write_tombstones
from ckn_scale.storage.plans import find_segment, require_segments
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.run_records import Deletion, Segment, Version
from ckn_scale.storage.stored_files import read_table

log = logging.getLogger(__name__)

MAX_STARTS = 20  # while others publish
UNKNOWN_SHOWN = 3


@dataclass(frozen=True)
class DeletionReport:
    """What a call deleted, and the version that is current now."""

    deleted: int
    already: int  # deleted or replaced before
    version: int | None  # none: nothing was published yet, and the first version will be without them
    rows: int


def delete_images(run: RunFolder, ids: Sequence[int] = (), uris: Sequence[str] = ()) -> DeletionReport:
    """Publish the next version without these images.

    A URI stands for the image that has it now. InputError, and nothing is deleted, when one is unknown.
    """
    segments = require_segments(run)
    dead = find_dead(run, segments, read_deletions(run))
    wanted = np.union1d(_check_ids(run, segments, ids), _find_ids(run, segments, uris, dead))
    living = np.setdiff1d(wanted, dead.ids)
    if len(living):
        record_deletion(run, living, BY_USER)
    current = publish_deletions(run)
    number, rows = (None, 0) if current is None else (current.number, current.rows)
    return DeletionReport(len(living), len(wanted) - len(living), number, rows)


def _check_ids(run: RunFolder, segments: Sequence[Segment], ids: Sequence[int]) -> np.ndarray:
    planned = segments[-1].next_id
    unknown = [one for one in ids if not 0 <= one < planned]
    if unknown:
        raise InputError(
            f"{run.url} has no image {_name_some(unknown)}: ids are 0 to {planned - 1}; nothing was deleted"
        )
    return np.array(sorted(set(ids)), np.int64)


def _find_ids(
    run: RunFolder, segments: Sequence[Segment], uris: Sequence[str], dead: DeadImages
) -> np.ndarray:
    """The image that has each URI now, or the last one that had; one table of the plan in memory."""
    if not uris:
        return np.empty(0, np.int64)
    names = {name: uri for uri in uris for name in (uri, normalise_url(uri))}
    found: dict[str, int] = {}
    wanted = pa.array(names, pa.string())
    for file in (file for segment in segments for file in segment.files):
        table = read_table(run.store, file, columns=["image_id", "uri"])
        for row in table.filter(pc.is_in(table.column("uri"), wanted)).to_pylist():
            found[names[row["uri"]]] = row["image_id"]  # of several, the newest
    unknown = [uri for uri in uris if uri not in found]
    if unknown:
        raise InputError(f"{run.url} has no image {_name_some(unknown)}; nothing was deleted")
    return np.unique(np.array(list(found.values()), np.int64))


def _name_some(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:UNKNOWN_SHOWN]))
    return shown + (f" and {len(names) - UNKNOWN_SHOWN} more" if len(names) > UNKNOWN_SHOWN else "")


def publish_deletions(run: RunFolder) -> Version | None:
    """The current version, which holds nothing that was deleted; None when none was published yet.

    The version number is read first; the next one is the current version with the tombstones that all
    records ask for. Who loses it to another publisher looks again.
    """
    for _ in range(MAX_STARTS):
        after = max(run.versions.numbers(), default=0)
        current, records = run.versions.latest(), read_deletions(run)
        if current is None or current.deletions == len(records):
            return current
        offered = _without_dead(run, current, records, after + 1)
        hit_failpoint("data_written", "publish", offered.number)
        try:
            recorded = run.versions.create(offered).record
        except CorruptData:
            continue  # a damaged record keeps its number
        log.info("version %d has %d rows, the one before %d", recorded.number, recorded.rows, current.rows)
    raise RunFailed(f"{run.url}: others published {MAX_STARTS} times meanwhile; try again")


def _without_dead(run: RunFolder, current: Version, records: Sequence[Deletion], number: int) -> Version:
    """The next version: the index shards of the current one, with more tombstones."""
    segments, manifest = require_segments(run)[: current.segments], read_manifest(run.store, current.manifest)
    dead = find_dead(run, segments, records)
    before = find_dead(run, segments, [one for one in records if one.number <= current.deletions])
    held = find_tombstones(run.store, manifest.shards, dead.ids)
    folder = run.index_folder(current.build, new_attempt())
    rows = sum(shard.rows for shard in manifest.shards) - len(held)
    offered = replace(manifest, rows=rows, tombstones=write_tombstones(run.store, folder, held))
    newly, was_held = np.setdiff1d(dead.deleted, before.ids), read_ids(run.store, manifest.tombstones)
    certificate = current.certificate
    return replace(
        current,
        number=number,
        manifest=write_manifest(run.store, folder, offered),
        rows=rows,
        states=_move_states(run, segments, current.states, newly, np.setdiff1d(held, was_held)),
        deletions=len(records),
        certificate=replace(certificate, carried_from=certificate.carried_from or current.number),
        restores=None,
    )


def _move_states(
    run: RunFolder,
    segments: Sequence[Segment],
    states: Mapping[str, int],
    newly: np.ndarray,
    held: np.ndarray,
) -> dict[str, int]:
    """Counts of states once the `newly` deleted images are `deleted`; the `held` ones among them were ok.

    Others are counted where their shards have them now, unless these were encoded again since.
    """
    counts, commits = Counter(states), run.commits(ENCODE_IMAGES)
    moved = Counter({"ok": len(held)})
    others = np.setdiff1d(newly, held)
    for shard_id in find_shards(segments, others):
        first, end = find_segment(segments, shard_id).ids_of_shard(shard_id)
        here, commit = others[slice(*np.searchsorted(others, (first, end)))], commits.get(shard_id)
        moved.update(look_up_states(run.store, commit, here).values() if commit else [])
    moved["ok"] = len(held)
    for state, count in moved.items():
        taken = min(count, counts[state])
        counts[state] -= taken
        counts["deleted"] += taken
    return {state: count for state, count in sorted(counts.items()) if count}
