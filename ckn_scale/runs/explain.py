"""Why a search does or does not find an image: the stage that loses it, with the figures of each stage.

not indexed   not in the version: failed, deleted, replaced, or not published yet
shortlist     its vector is not among the nearest
head          vector and words put too many others before it: geometry did not look at it
matches       fewer points match than a match needs inliers
inliers       too few of the matches agree with one transform
rank          it matches, but others come first
found         it is in the answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.evidence import HEAD, SHORTLIST, choose_head, join_evidence
from ckn_scale.core.topk import NO_ID
from ckn_scale.errors import InputError
from ckn_scale.search.engine import Index
from ckn_scale.search.evidence import Query, score_points_of, verify_points_of
from ckn_scale.search.matches import ImageMatches, match_images
from ckn_scale.search.shard import ShardGroup
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.plans import read_segments
from ckn_scale.storage.run_folder import ENCODE_IMAGES, VECTORS_STAGE, RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.stored_files import read_table

STAGES = ("not indexed", "shortlist", "head", "matches", "inliers", "rank", "found")


@dataclass(frozen=True)
class Expected:
    """The image that a search was expected to find."""

    image_id: int
    uri: str
    state: (
        str  # `indexed`, a state of the run's images, `deleted or replaced`, `not encoded` or `not published`
    )
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """The stage that decided, in a word and a sentence, and what was measured; None where it was not."""

    expected: Expected
    stage: str
    sentence: str
    shortlist: int = SHORTLIST  # how many are scored by words
    head: int = HEAD  # how many are verified
    query_points: int | None = None
    expected_points: int | None = None
    similarity: float | None = None
    similarity_rank: int | None = None  # None: behind the shortlist
    selective: float | None = None
    head_rank: int | None = None
    matches: int | None = None
    inliers: int | None = None
    min_inliers: int | None = None
    rank: int | None = None  # in the answer

    def to_body(self) -> dict[str, Any]:
        return asdict(self)


def explain_search(
    run: RunFolder,
    index: Index,
    query: Query,
    expected: str,
    *,
    k: int = 10,
    shortlist: int = SHORTLIST,
    head: int = HEAD,
) -> tuple[Explanation, ImageMatches | None]:
    """What becomes of an image, given by its id or URI, in a search; and its matches with the query.

    InputError when the run has no such image.
    """
    image = find_image(run, index.shards, expected)
    if image.state != "indexed":
        why = f": {image.reason}" if image.reason else ""
        sentence = f"not in version {index.version}: {image.state}{why}"
        return Explanation(image, "not indexed", sentence, shortlist, head), None
    found = _find(index, query, image.image_id, shortlist)
    if query.points is None or not index.can_verify:
        return _explain_by_vectors(image, found, k, shortlist, head), None
    matches = match_images(index.shards, query.points, [image.image_id])[0]
    return _explain_by_points(index, query, image, found, matches, k, shortlist, head), matches


@dataclass(frozen=True)
class _Found:
    """A shortlist, and where the image is in it."""

    image_ids: np.ndarray
    similarity: np.ndarray
    place: int | None  # None: it is not
    own: float  # similarity of the image


def _find(index: Index, query: Query, image_id: int, shortlist: int) -> _Found:
    scores, found = index.shards.find(query.vector[None], shortlist)
    ids, similarity = found[0][found[0] != NO_ID], scores[0][found[0] != NO_ID]
    places = np.flatnonzero(ids == image_id)
    own = similarity[places] if len(places) else index.shards.compare(query.vector, np.array([image_id]))
    return _Found(ids, similarity, int(places[0]) if len(places) else None, float(own[0]))


def _explain_by_vectors(image: Expected, found: _Found, k: int, shortlist: int, head: int) -> Explanation:
    rank = None if found.place is None else found.place + 1
    if rank is None:
        stage, sentence = "shortlist", f"not among the {shortlist} most similar (similarity {found.own:.3f})"
    elif rank > k:
        stage, sentence = "rank", f"at rank {rank}, behind the first {k}: by vectors alone"
    else:
        stage, sentence = "found", f"found at rank {rank}, by vectors alone"
    return Explanation(
        image, stage, sentence, shortlist, head, similarity=found.own, similarity_rank=rank, rank=rank
    )


def _explain_by_points(
    index: Index,
    query: Query,
    image: Expected,
    found: _Found,
    matches: ImageMatches,
    k: int,
    shortlist: int,
    head: int,
) -> Explanation:
    assert query.points is not None
    selective = score_points_of(index.shards, query.points, found.image_ids)
    verified = choose_head(found.image_ids, found.similarity, selective, head)
    inliers = np.zeros(len(found.image_ids), np.int64)
    ids = found.image_ids[verified]
    inliers[verified] = [one.inliers for one in verify_points_of(index.shards, query.points, ids)]
    order = np.lexsort((found.image_ids, -join_evidence(found.similarity, selective, inliers)))
    place = found.place
    by_words = choose_head(found.image_ids, found.similarity, selective, len(found.image_ids))
    head_rank = None if place is None else int(np.flatnonzero(by_words == place)[0]) + 1
    rank = None if place is None else int(np.flatnonzero(order == place)[0]) + 1
    own = score_points_of(index.shards, query.points, np.array([image.image_id]))[0]
    needed, tentative = index.calibration.min_inliers, len(matches.query)
    stage, sentence = _judge(found, matches, needed, k, shortlist, head, head_rank, rank)
    return Explanation(
        image,
        stage,
        sentence,
        shortlist,
        head,
        query_points=len(query.points),
        expected_points=matches.num_points,
        similarity=found.own,
        similarity_rank=None if place is None else place + 1,
        selective=float(own),
        head_rank=head_rank,
        matches=tentative,
        inliers=matches.inliers,
        min_inliers=needed,
        rank=rank,
    )


def _judge(
    found: _Found,
    matches: ImageMatches,
    needed: int,
    k: int,
    shortlist: int,
    head: int,
    head_rank: int | None,
    rank: int | None,
) -> tuple[str, str]:
    tentative, inliers = len(matches.query), matches.inliers
    if head_rank is None or rank is None:
        would = "would match" if inliers >= needed else "would not match"
        return "shortlist", (
            f"its vector is not among the {shortlist} nearest (similarity {found.own:.3f}); with {inliers} "
            f"inliers it {would}"
        )
    if head_rank > head:
        return "head", (
            f"at rank {head_rank} by vector and words; geometry looks at the first {head} "
            f"({inliers} inliers, {needed} are needed)"
        )
    if tentative < needed:
        return "matches", f"{tentative} points match, and a match needs {needed} inliers"
    if inliers < needed:
        return "inliers", f"{inliers} of {tentative} matches agree apart from each other; {needed} are needed"
    if rank > k:
        return "rank", f"a match with {inliers} inliers, but at rank {rank}, behind the first {k}"
    return "found", f"found at rank {rank} with {inliers} inliers"


def find_image(run: RunFolder, group: ShardGroup, expected: str) -> Expected:
    """An image of the run by its id or URI, and what became of it; InputError when there is none."""
    segments = read_segments(run)
    image_id = int(expected) if expected.isdecimal() else _find_uri(run, segments, expected)
    segment = next((one for one in segments if one.first_id <= image_id < one.next_id), None)
    if segment is None:
        raise InputError(
            f"{run.url} has no image {expected}: give the id or the URI of one it was planned with"
        )
    shard_id = segment.first_shard + (image_id - segment.first_id) // segment.images_per_shard
    uri = _read_uri(run, segment, image_id)
    if group.vector(image_id) is not None:
        return Expected(image_id, uri, "indexed")
    commit = run.commits(ENCODE_IMAGES).get(shard_id)
    if commit is None:
        return Expected(image_id, uri, "not encoded", "run `ckn-scale index` to the end")
    table = read_table(run.store, commit.files[VECTORS_STAGE], ["image_id", "state", "reason"])
    row = table.filter(pc.equal(table.column("image_id"), image_id)).to_pylist()[0]
    if row["state"] != "ok":
        return Expected(image_id, uri, row["state"], row["reason"])
    if any(shard.index.ids[0] <= image_id <= shard.index.ids[-1] for shard in group.shards):
        return Expected(image_id, uri, "deleted or replaced")
    return Expected(image_id, uri, "not published")


def _find_uri(run: RunFolder, segments: Sequence[Segment], uri: str) -> int:
    """The id of the newest image of this URI; -1 when there is none."""
    wanted = pa.array(list(dict.fromkeys([uri, normalise_url(uri)])))
    for segment in reversed(segments):
        for file in segment.files:
            table = read_table(run.store, file, ["image_id", "uri"])
            ids = table.filter(pc.is_in(table.column("uri"), wanted)).column("image_id").to_pylist()
            if ids:
                return int(ids[-1])
    return -1


def _read_uri(run: RunFolder, segment: Segment, image_id: int) -> str:
    for file in segment.files:
        table = read_table(run.store, file, ["image_id", "uri"])
        names = table.filter(pc.equal(table.column("image_id"), image_id)).column("uri").to_pylist()
        if names:
            return str(names[0])
    raise InputError(f"{run.url}: the plan has no row for image {image_id}")
