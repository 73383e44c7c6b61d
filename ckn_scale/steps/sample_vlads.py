"""Sample: unreduced VLADs of the sampled images, the training set of the reduction."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa

from ckn_scale import schemas
from ckn_scale.core.encoder import ImageEncoder, PreparedImage
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.encode_images import read_vector_column
from ckn_scale.steps.model_parts import encoder_part, find_models, load_parts
from ckn_scale.steps.prepare_images import prepare_images
from ckn_scale.steps.sample_patches import SampledImagesStep
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table

STAGE = "samples/vlads"


class SampleVlads(SampledImagesStep):
    name = "sample_vlads"
    sections = ("images", "keypoints", "patches", "sample", "channels", "training", "vlad")

    @cached_property
    def encoder(self) -> ImageEncoder:
        models = find_models(self.run, ["train_ckn", "train_projection", "train_codebook"])
        parts = {**load_parts(self.run, models), "encoder": encoder_part(self.settings)}
        return ImageEncoder.from_parts(parts, with_reduction=False)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        ids, vectors = [], []
        deadline_s = self.settings.encode.image_deadline_s
        images = self.images_of(shard_id)
        for image, outcome in prepare_images(images, self.encoder.front, worker, deadline_s):
            if isinstance(outcome, PreparedImage):
                vector = self.encoder.encode_prepared([outcome], max_points=0)[0].vector
                ids.append(image.image_id)
                vectors.append(vector.astype("<f2").tobytes())
        schema = schemas.sampled_vlads(self.encoder.dim)
        return ShardResult(tables={STAGE: pa.table([ids, vectors], schema=schema)})


def read_vlads(run: RunFolder) -> np.ndarray:
    """(N, D) float16, in image order."""
    commits = sorted(run.commits(SampleVlads.name).committed().items())
    tables = [read_table(run.store, commit.files[STAGE]) for _, commit in commits]
    return np.concatenate([read_vector_column(table) for table in tables])
