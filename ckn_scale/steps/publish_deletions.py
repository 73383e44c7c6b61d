"""Publish deletions: the current version without what was deleted is the next one. Takes seconds.

The same rule as of all who publish (`publish.py`), without building or asking anything: index shards stay as
they are, and tombstones say which of their rows are in no answer any more. The certificate is carried over:
without an image others only rank better.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckn_scale.errors import CorruptData, RunFailed
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.storage.deletions import (
    find_dead,
    find_shards,
    find_tombstones,
    look_up_states,
    read_deletions,
)
from ckn_scale.storage.index_files import read_ids, read_manifest, write_manifest, write_tombstones
from ckn_scale.storage.plans import find_segment, require_segments
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.run_records import Deletion, Segment, Version

log = logging.getLogger(__name__)

MAX_STARTS = 20  # while others publish


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
