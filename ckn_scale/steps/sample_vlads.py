"""Sample: unreduced VLADs of the sampled images, the training set of the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from ckn_scale.core.encoder import ImageEncoder, PreparedImage
from ckn_scale.core.specs import ReductionSpec
from ckn_scale.schemas import read_vectors, sampled_vlads
from ckn_scale.steps.base import ShardResult, WorkerSettings
from ckn_scale.steps.model_parts import encoder_part, find_models, load_parts, trained_logs
from ckn_scale.steps.prepare_images import prepare_images
from ckn_scale.steps.sample_patches import SampledImagesStep
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table

STAGE = "samples/vlads"


def supported_dim(num_images: int, spec: ReductionSpec) -> int | None:
    """How many whitened dimensions a sample supports; None: keep the VLAD as it is."""
    dim = min(spec.dim, int(num_images / spec.images_per_dim))
    return dim if dim >= spec.min_dim else None


class SampleVlads(SampledImagesStep):
    name = "sample_vlads"
    sections = ("images", "keypoints", "patches", "sample", "channels", "training", "vlad", "reduction")

    def shard_ids(self) -> Sequence[int]:
        """None at all when so few images were sampled that there is nothing to learn from them."""
        spec = self.settings.reduction
        return super().shard_ids() if supported_dim(len(self.sample), spec) is not None else range(0)

    @cached_property
    def encoder(self) -> ImageEncoder:
        models = find_models(self.run, trained_logs(self.settings))
        parts = {**load_parts(self.run, models), "encoder": encoder_part(self.settings)}
        return ImageEncoder.from_parts(parts, with_reduction=False)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        ids, vectors = [], []
        deadline_s = self.settings.encode.image_deadline_s
        images = self.images_of(shard_id)
        for image, outcome in prepare_images(images, self.encoder.front.prepare, worker, deadline_s):
            if isinstance(outcome, PreparedImage):
                vector = self.encoder.encode_prepared([outcome], max_points=0)[0].vector
                ids.append(image.image_id)
                vectors.append(vector.astype("<f2").tobytes())
        schema = sampled_vlads(self.encoder.dim)
        return ShardResult(tables={STAGE: pa.table([ids, vectors], schema=schema)})


def read_vlads(run: RunFolder) -> np.ndarray:
    """(N, D) float16, in image order."""
    commits = sorted(run.commits(SampleVlads.name).committed().items())
    tables = [read_table(run.store, commit.files[STAGE]) for _, commit in commits]
    return np.concatenate([read_vectors(table) for table in tables]) if tables else np.empty((0, 0))
