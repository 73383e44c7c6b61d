"""Plant: a rendered view of each drawn image becomes a query, beside the evidence for its original.

A planted query is itself not indexed. A worker opens the index shards that hold its originals, no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.encoder import ImageEncoder
from ckn_scale.core.evidence import SHORTLIST, QueryPoints
from ckn_scale.core.images import decode_image, encode_jpeg
from ckn_scale.errors import ImageRejected
from ckn_scale.prepare_images import prepare_images
from ckn_scale.schemas import planted_queries_schema
from ckn_scale.search.engine import load_encoder
from ckn_scale.search.evidence import make_query, score_points_of, verify_points_of
from ckn_scale.search.shard import ShardGroup
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.draw_queries import Draw, read_draw
from ckn_scale.storage.index_files import IndexManifest, read_manifest
from ckn_scale.storage.run_folder import PLANT_QUERIES, planted_stage
from ckn_scale.storage.stored_files import StoredFile

HITS_LOOKED_AT = 100
JPEG_QUALITY = 85


@dataclass(frozen=True, eq=False)
class PlantQueries(Step):
    """One shard per `publish.queries_per_shard` of the images that were drawn."""

    manifest_file: StoredFile
    draw_name: str  # as `write_draw` gives it

    name = PLANT_QUERIES
    sections = (*BuildIndex.sections, "publish")
    label_fields = ("draw_name",)
    version = 2

    @cached_property
    def draw(self) -> Draw:
        return read_draw(self.run, self.draw_name)

    @cached_property
    def manifest(self) -> IndexManifest:
        return read_manifest(self.run.store, self.manifest_file)

    @cached_property
    def encoder(self) -> ImageEncoder:
        return load_encoder(self.run.store, self.manifest)

    @property
    def stage(self) -> str:
        return planted_stage(self.draw_name)

    def shard_ids(self) -> Sequence[int]:
        return range(-(-len(self.draw.asked) // self.settings.publish.queries_per_shard))

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        size = self.settings.publish.queries_per_shard
        asked = self.draw.asked[shard_id * size : (shard_id + 1) * size]
        held = [
            shard.shard
            for shard in self.manifest.shards
            if any(shard.first_id <= image.image_id <= shard.last_id for image in asked)
        ]
        group = ShardGroup(self.run.store, self.manifest, held)
        decode = partial(decode_image, spec=self.settings.images)
        decoded = prepare_images(asked, decode, worker, self.settings.encode.image_deadline_s)
        rows = []
        for position, (image, pixels) in enumerate(decoded, start=shard_id * size):
            original = group.vector(image.image_id)
            if original is None or isinstance(pixels, ImageRejected):
                continue  # not in the index, or gone since: it cannot be asked for
            view = self.draw.view(position, len(VIEWS))
            rows.append(self._plant(image.image_id, view, pixels, original, group))
        table = pa.Table.from_pylist(rows, schema=planted_queries_schema(self.manifest.dim))
        return ShardResult(tables={self.stage: table})

    def _plant(
        self, image_id: int, view: int, pixels: np.ndarray, original: np.ndarray, group: ShardGroup
    ) -> dict[str, Any]:
        """A row of the table; without a vector when the view shows nothing, or its original is far behind."""
        row = {"image_id": image_id, "view": view, "original": original.astype("<f4").tobytes()}
        rendered = render_view(pixels, list(VIEWS)[view], seed=image_id)
        try:
            encoded = self.encoder.encode_bytes(encode_jpeg(rendered, JPEG_QUALITY))
        except ImageRejected:
            return row
        query = make_query(encoded, self.encoder)
        similarity, ids = group.find(query.vector[None], SHORTLIST)
        place = np.flatnonzero(ids[0] == image_id)
        if len(place) == 0:
            return row
        found: dict[str, Any] = {"score": float(similarity[0, place[0]])}
        found["vector"] = query.vector.astype("<f4").tobytes()
        if group.has_points and query.points is not None:
            only = np.array([image_id])
            found["selective"] = float(score_points_of(group, query.points, only)[0])
            found["inliers"] = verify_points_of(group, query.points, only)[0].inliers
            found |= pack_points(query.points)
        return {**row, **found}


def pack_points(points: QueryPoints) -> dict[str, Any]:
    """The columns of a planted query that hold its points."""
    return {
        "num_points": len(points),
        "words": points.words.astype("<u2").tobytes(),
        "codes": points.codes.tobytes(),
        "frames": points.frames.astype("<f4").tobytes(),
        "width_px": points.size_px[0],
        "height_px": points.size_px[1],
    }


def unpack_points(row: Mapping[str, Any]) -> QueryPoints | None:
    """What `pack_points` made columns of; None where a query has no points."""
    count = row["num_points"]
    if not count:
        return None
    words = np.frombuffer(row["words"], "<u2").astype(np.uint16).reshape(count, -1)
    codes = np.frombuffer(row["codes"], np.uint8).reshape(*words.shape, -1)
    frames = np.frombuffer(row["frames"], "<f4").astype(np.float32).reshape(count, 2, 3)
    return QueryPoints(words, codes, frames, (row["width_px"], row["height_px"]))
