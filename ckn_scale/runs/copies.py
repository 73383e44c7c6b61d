"""Groups of near-copies in a published version, from the pairs that `steps/find_copies.py` found.

    copies.parquet, copies.csv   a row for each image that has a copy; the largest groups first

An image belongs to the group that verified pairs lead to, named by its smallest image id. `score` and
`inliers` are those of its best pair. The representative is the one with most pixels: the one to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ckn_scale.core.copies import (
    MIN_INLIERS,
    MIN_SHARE,
    NEIGHBOURS,
    SAME_SCORE,
    ScoredPairs,
    choose_nearest,
    find_components,
)
from ckn_scale.steps.find_copies import PAIRS, FindCopies
from ckn_scale.storage.run_folder import COPIES_STAGE
from ckn_scale.storage.stored_files import read_table

COPIES = pa.schema(
    [
        ("group", pa.int64()),  # its smallest image id
        ("images", pa.int64()),  # in the group
        ("image_id", pa.int64()),
        ("uri", pa.string()),
        ("representative", pa.bool_()),
        ("score", pa.float64()),  # with the member most like it; 1: the same vector
        ("inliers", pa.int32()),  # with the same member; null: compared by vectors alone
    ]
)


@dataclass(frozen=True)
class Copies:
    """What was found: rows of COPIES, largest groups first, members by id."""

    images: int  # compared
    candidates: int  # pairs that stand out by their vectors
    verified: int | None  # of them by geometry; none where the run keeps no points
    table: pa.Table

    @property
    def groups(self) -> int:
        return len(pc.unique(self.table.column("group")))

    @property
    def removable(self) -> int:
        """Images that are left out when each group keeps one."""
        return len(self.table) - self.groups

    def largest(self, count: int) -> list[list[dict[str, Any]]]:
        """The rows of the largest groups, group by group."""
        groups = self.table.column("group").to_numpy()
        starts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
        bounds = pairwise([*starts, len(groups)])
        return [self.table.slice(start, end - start).to_pylist() for start, end in islice(bounds, count)]


def group_copies(step: FindCopies, min_share: float = MIN_SHARE) -> Copies:
    """The groups that the committed pairs of a step make.

    `min_share` is that of the points of two copies which agree, in the image that has fewer.
    """
    commits = step.log.committed()
    files = [commits[number].files[COPIES_STAGE] for number in step.shard_ids()]
    found = pa.concat_tables([PAIRS.empty_table(), *(read_table(step.run.store, file) for file in files)])
    pairs = ScoredPairs(*(found.column(name).to_numpy() for name in ("first_id", "second_id", "score")))
    found = found.take(choose_nearest(pairs, NEIGHBOURS))  # in the whole version, however it is cut
    verified = found.filter(_is_copy(found, min_share))
    has_points = all(shard.points is not None for shard in step.shards)
    return Copies(
        images=step.manifest.rows,
        candidates=len(found),
        verified=len(verified) if has_points else None,
        table=_tabulate(verified),
    )


def _is_copy(found: pa.Table, min_share: float) -> pa.ChunkedArray:
    """Same vectors are enough: of an image with few points few can agree."""
    same = pc.greater_equal(found.column("score"), SAME_SCORE)
    needed = pc.max_element_wise(pc.multiply(found.column("points"), min_share), float(MIN_INLIERS))
    agree = pc.greater_equal(found.column("inliers"), needed)  # null without points
    return pc.or_(same, pc.fill_null(agree, True))


def _tabulate(pairs: pa.Table) -> pa.Table:
    """The images of pairs with their groups; the rows of COPIES."""
    sides = [_turn(pairs, "first", "second"), _turn(pairs, "second", "first")]
    order = [("image_id", "ascending"), ("score", "descending"), ("other_id", "ascending")]
    every = pa.concat_tables(sides).sort_by(order)
    owners = every.column("image_id").to_numpy()
    best = every.take(np.flatnonzero(np.diff(owners, prepend=-1)))  # of each image, by id
    _, groups = find_components(pairs.column("first_id").to_numpy(), pairs.column("second_id").to_numpy())
    ids, pixels = best.column("image_id").to_numpy(), best.column("pixels").to_numpy()
    _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    images = counts[places]
    keep = np.zeros(len(ids), bool)
    by_pixels = np.lexsort((ids, -pixels, groups))
    keep[by_pixels[np.flatnonzero(np.diff(groups[by_pixels], prepend=-1))]] = True
    columns = [groups, images, ids, best.column("uri"), keep, best.column("score"), best.column("inliers")]
    return pa.table(columns, schema=COPIES).take(np.lexsort((ids, groups, -images)))


def _turn(pairs: pa.Table, one: str, other: str) -> pa.Table:
    names = {
        f"{one}_id": "image_id",
        f"{other}_id": "other_id",
        f"{one}_uri": "uri",
        f"{one}_pixels": "pixels",
    }
    wanted = pairs.select([*names, "score", "inliers"])
    return wanted.rename_columns([names.get(name, name) for name in wanted.column_names])


def write_copies(folder: Path, found: Copies) -> None:
    """The tables, for people and for programs."""
    pq.write_table(found.table, folder / "copies.parquet")
    pa.csv.write_csv(found.table, str(folder / "copies.csv"))
