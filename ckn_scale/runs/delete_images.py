"""Delete images: a record of their ids, and the next version, which is the current one without them.

Nothing is rebuilt or asked: index shards stay as they are, and the version's tombstones say which of their
rows are in no answer any more. `ckn-scale purge` removes what is left of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import InputError
from ckn_scale.steps.publish_deletions import publish_deletions
from ckn_scale.storage.deletions import BY_USER, find_dead, read_deletions, record_deletion
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.plans import require_segments
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.stored_files import read_table

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
    wanted = np.union1d(_check_ids(run, segments, ids), _find_ids(run, segments, uris))
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


def _find_ids(run: RunFolder, segments: Sequence[Segment], uris: Sequence[str]) -> np.ndarray:
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
