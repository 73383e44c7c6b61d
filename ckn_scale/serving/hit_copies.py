"""`search/hit_copies.py` over groups: they give stored rows and points of what they own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from ckn_scale.core.copies import SAME_SCORE, ScoredPairs, SignRows, StoredRows, VectorRows, restore_rows
from ckn_scale.core.evidence import QueryPoints
from ckn_scale.search.hit_copies import find_alike, is_copy, name_groups
from ckn_scale.serving.messages import Encoded
from ckn_scale.serving.rounds import Rounds


async def find_copies(
    rounds: Rounds, image_ids: Sequence[int], references: StoredRows, executor: Executor
) -> dict[int, int]:
    """The group of each of these images that has a copy among them."""
    has_points = rounds.version.calibration is not None
    rows = await load_rows(rounds, np.sort(np.asarray(image_ids, np.int64)))
    if len(rows.ids) < 2:
        return {}
    find = partial(find_alike, rows, references, verified=has_points)
    pairs = await asyncio.get_running_loop().run_in_executor(executor, find)
    if has_points:
        pairs = pairs.take(np.flatnonzero(await verify_pairs(rounds, pairs)))
    return name_groups(pairs)


async def load_rows(rounds: Rounds, image_ids: np.ndarray) -> SignRows | VectorRows:
    """What the groups that answer keep of these images, by ascending id."""
    image_ids = np.sort(image_ids)
    owned = rounds.split(image_ids)
    found = await rounds.ask("load_rows", {one: (image_ids[rows],) for one, rows in owned.items()})
    if not found:
        return VectorRows(np.empty(0, np.int64), None, np.empty((0, 1), np.float32))
    places = np.concatenate([owned[group] for group in found])
    order = np.argsort(places)
    return restore_rows(image_ids[places[order]], np.concatenate(list(found.values()))[order])


async def verify_pairs(rounds: Rounds, pairs: ScoredPairs) -> np.ndarray:
    """(P,) bool: whether one transform explains enough of both; same vectors are enough."""
    agree = pairs.scores >= SAME_SCORE
    unsure = np.flatnonzero(~agree)
    points = await _load_points(rounds, np.union1d(pairs.first[unsure], pairs.second[unsure]))
    asked: dict[int, list[int]] = defaultdict(list)  # rows of pairs by their first image
    for row in unsure.tolist():
        if int(pairs.first[row]) in points and int(pairs.second[row]) in points:
            asked[int(pairs.first[row])].append(row)
    verified = await asyncio.gather(
        *(_count_inliers(rounds, points[one], pairs.second[rows]) for one, rows in asked.items())
    )
    for (one, rows), inliers in zip(asked.items(), verified, strict=True):
        for row, count in zip(rows, inliers, strict=True):
            agree[row] = is_copy(count, points[one], points[int(pairs.second[row])])
    return agree


async def _load_points(rounds: Rounds, image_ids: np.ndarray) -> dict[int, QueryPoints]:
    async def load(image_id: int) -> Encoded | None:
        calls = dict.fromkeys(rounds.split(np.array([image_id])), (image_id,))
        return next(iter((await rounds.ask("load_query", calls)).values()), None)

    loaded = await asyncio.gather(*(load(one) for one in image_ids.tolist()))
    return {
        one: encoded.points
        for one, encoded in zip(image_ids.tolist(), loaded, strict=True)
        if encoded is not None and encoded.points is not None
    }


async def _count_inliers(rounds: Rounds, points: QueryPoints, image_ids: np.ndarray) -> list[int]:
    """Of a pair's first image and each second one; 0 where its group was lost."""
    owned = rounds.split(image_ids)
    found = await rounds.ask("verify", {one: (points, image_ids[rows]) for one, rows in owned.items()})
    inliers = [0] * len(image_ids)
    for group, evidence in found.items():
        for row, one in zip(owned[group].tolist(), evidence, strict=True):
            inliers[row] = one.inliers
    return inliers
