"""Encode: every planned image once → its state and vector, its strongest points, its thumbnail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale import schemas
from ckn_scale.core.encoder import EncodedImage, ImageEncoder
from ckn_scale.core.images import encode_thumbnail
from ckn_scale.core.pca import BLOCK_ROWS
from ckn_scale.core.preprocessor import PreparedImage
from ckn_scale.core.vector_codes import VectorCodec, make_codec
from ckn_scale.errors import ImageRejected
from ckn_scale.prepare_images import ImageOutcome, prepare_images
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.storage.deletions import find_purged
from ckn_scale.storage.models import load_models, read_generation
from ckn_scale.storage.plans import PlannedImage, PlanReader, count_shards, find_segment, require_segments
from ckn_scale.storage.run_folder import DESCRIPTORS_STAGE, ENCODE_IMAGES, THUMBNAILS_STAGE, VECTORS_STAGE

_NOTHING = np.empty(0, np.float32)
PURGED = "purged"  # the reason of a row that has nothing left
PATCHES_PER_GROUP = 4096  # images are encoded together until they have this many patches


@dataclass(frozen=True)
class EncodedRow:
    image: PlannedImage
    encoded: EncodedImage | None
    rejected: ImageRejected | None
    thumbnail: bytes | None
    code: bytes | None = None  # of its vector

    @property
    def state(self) -> str:
        return "ok" if self.rejected is None else self.rejected.state


class EncodeImages(Step):
    name = ENCODE_IMAGES
    version = 5
    sections = ("images", "keypoints", "patches", "channels", "vlad", "reduction", "points", "encode")

    @cached_property
    def plan(self) -> PlanReader:
        return PlanReader(self.run, require_segments(self.run))

    @cached_property
    def encoder(self) -> ImageEncoder:
        return ImageEncoder.from_parts(load_models(self.run.store, read_generation(self.run).models))

    @cached_property
    def codec(self) -> VectorCodec:
        return make_codec(self.settings.reduction.stored, self.encoder.dim)

    def shard_ids(self) -> Sequence[int]:
        return range(count_shards(self.plan.segments))

    def num_images(self, shard_id: int) -> int:
        return self.plan.count_images(shard_id)

    def inputs(self) -> Mapping[str, Any]:
        return {name: file.sha256 for name, file in read_generation(self.run).models.items()}

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        images, purged = self.plan.read_shard(shard_id), self._find_purged(shard_id)
        kept = [image for image in images if image.image_id not in purged]
        deadline_s = self.settings.encode.image_deadline_s
        outcomes = prepare_images(kept, self.encoder.preprocessor.prepare, worker, deadline_s)
        rows = list(self._encode(outcomes))
        for image in images:
            if state := purged.get(image.image_id):
                rows.append(EncodedRow(image, None, ImageRejected(state, PURGED), None))
        rows.sort(key=lambda row: row.image.image_id)
        tables = {
            VECTORS_STAGE: tabulate_vectors(rows, self.codec),
            DESCRIPTORS_STAGE: tabulate_descriptors(rows),
            THUMBNAILS_STAGE: tabulate_thumbnails(rows),
        }
        return ShardResult(
            tables=tables,
            states=Counter(row.state for row in rows),
            report=report_not_ok(tables[VECTORS_STAGE]),
        )

    def _find_purged(self, shard_id: int) -> dict[int, str]:
        """Images of a shard that a purge left nothing of, with their states: nobody reads them again."""
        purged = find_purged(self.run, self.plan.segments, self.run.purges.latest())
        here = purged.of_range(*find_segment(self.plan.segments, shard_id).ids_of_shard(shard_id))
        return {image_id: state for state, ids in here.by_state() for image_id in ids.tolist()}

    def _encode(self, outcomes: Iterator[ImageOutcome[PreparedImage]]) -> Iterator[EncodedRow]:
        """Every outcome as a row, in order; the vectors are reduced in full blocks."""
        waiting: list[EncodedRow] = []
        for group in group_by_patches(outcomes):
            waiting += self._describe_group(group)
            full = len(waiting) - len(waiting) % BLOCK_ROWS
            yield from self._reduce(waiting[:full])
            waiting = waiting[full:]
        yield from self._reduce(waiting)

    def _describe_group(self, group: Sequence[ImageOutcome[PreparedImage]]) -> Iterator[EncodedRow]:
        prepared = [outcome for _, outcome in group if isinstance(outcome, PreparedImage)]
        described = iter(self.encoder.describe_prepared(prepared))
        for image, outcome in group:
            if isinstance(outcome, ImageRejected):
                yield EncodedRow(image, None, outcome, None)
            else:
                thumbnail = encode_thumbnail(outcome.image, self.settings.encode.thumbnail_side_px)
                yield EncodedRow(image, next(described), None, thumbnail)

    def _reduce(self, rows: Sequence[EncodedRow]) -> Iterator[EncodedRow]:
        """Rows with the codes of their vectors; VLADs and descriptors, which are large, go."""
        vlads = [row.encoded.vector for row in rows if row.encoded is not None]
        codes = iter(self.codec.encode(self.encoder.reduce(np.stack(vlads))) if vlads else ())
        for row in rows:
            if row.encoded is None:
                yield row
            else:
                encoded = replace(row.encoded, vector=_NOTHING, descriptors=_NOTHING)
                yield replace(row, encoded=encoded, code=next(codes).tobytes())


def group_by_patches(
    outcomes: Iterator[ImageOutcome[PreparedImage]],
) -> Iterator[list[ImageOutcome[PreparedImage]]]:
    """Groups of images that are described together."""
    group: list[ImageOutcome[PreparedImage]] = []
    patches = 0
    for image, outcome in outcomes:
        group.append((image, outcome))
        patches += 0 if isinstance(outcome, ImageRejected) else len(outcome.patches)
        if patches >= PATCHES_PER_GROUP:
            yield group
            group, patches = [], 0
    yield group


def tabulate_vectors(rows: Sequence[EncodedRow], codec: VectorCodec) -> pa.Table:
    columns = [
        [row.image.image_id for row in rows],
        [row.state for row in rows],
        [row.rejected.reason if row.rejected else "" for row in rows],
        [row.encoded.width_px if row.encoded else 0 for row in rows],
        [row.encoded.height_px if row.encoded else 0 for row in rows],
        [row.encoded.original_size_px[0] if row.encoded else 0 for row in rows],
        [row.encoded.original_size_px[1] if row.encoded else 0 for row in rows],
        [row.code for row in rows],
    ]
    schema = schemas.vectors_schema(codec.name, codec.dim, codec.code_bytes)
    return pa.table(columns, schema=schema)


def report_not_ok(vectors: pa.Table) -> dict[str, Any]:
    """What a record says of images that are not ok: their ids by state, nothing when all are."""
    table = vectors.filter(pc.not_equal(vectors.column("state"), "ok"))
    not_ok: dict[str, list[int]] = {}
    for row in table.select(["image_id", "state"]).to_pylist():
        not_ok.setdefault(row["state"], []).append(row["image_id"])
    return {"not_ok": not_ok} if not_ok else {}


def tabulate_descriptors(rows: Sequence[EncodedRow]) -> pa.Table:
    encoded = [(row.image.image_id, row.encoded) for row in rows if row.encoded is not None]
    columns = [
        [image_id for image_id, _ in encoded],
        [len(one.words) for _, one in encoded],
        [one.frames.tobytes() for _, one in encoded],
        [one.words.astype("<u2").tobytes() for _, one in encoded],
        [one.codes.tobytes() for _, one in encoded],
    ]
    return pa.table(columns, schema=schemas.DESCRIPTORS)


def tabulate_thumbnails(rows: Sequence[EncodedRow]) -> pa.Table:
    shown = [row for row in rows if row.thumbnail is not None]
    columns = [[row.image.image_id for row in shown], [row.thumbnail for row in shown]]
    return pa.table(columns, schema=schemas.THUMBNAILS)
