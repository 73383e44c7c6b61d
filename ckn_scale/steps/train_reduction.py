"""Train: the reduction of VLADs, from unreduced ones of sampled images or of a background.

Workers describe the images; the VLADs are kept in blocks of columns, so that one worker can fit the
reduction without holding them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import pyarrow as pa

from ckn_scale.config import Settings
from ckn_scale.core.encoder import ImageEncoder, Reduction, encoder_metadata
from ckn_scale.core.flattening import learn_flattening
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import fit_projection_of_columns, split_columns
from ckn_scale.core.preprocessor import PreparedImage
from ckn_scale.core.specs import ProjectionSpec, ReductionSpec
from ckn_scale.prepare_images import prepare_images
from ckn_scale.schemas import read_sampled_vlads, sampled_vlads_schema
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.encode_images import group_by_patches
from ckn_scale.steps.sample_patches import SampledImagesStep, make_preprocessor
from ckn_scale.steps.take_networks import list_network_labels
from ckn_scale.steps.train_descriptors import TrainCodebook, TrainProjection
from ckn_scale.steps.train_layers import save_result
from ckn_scale.storage.models import find_trained, load_models
from ckn_scale.storage.plans import PlannedImage, hash_uri, read_images
from ckn_scale.storage.run_folder import SAMPLE_VLADS, RunFolder, sampled_vlads_stage
from ckn_scale.storage.stored_files import read_table

log = logging.getLogger(__name__)


class SampleVlads(SampledImagesStep):
    """Of the background if there is one, else of as many sampled images as the fit needs."""

    name = SAMPLE_VLADS
    version = 3
    sections = ("images", "keypoints", "patches", "sample", "channels", "training", "vlad", "reduction")

    @cached_property
    def sample(self) -> list[PlannedImage]:
        background = self.run.background.latest()
        if background is not None:
            return read_images(self.run, background.images)
        drawn = self.read_drawn()
        seed, count = self.settings.sample.seed, self.settings.reduction.num_images
        chosen = sorted(drawn, key=lambda image: hash_uri(seed, image.uri))[:count]
        return sorted(chosen, key=lambda image: image.image_id)

    def inputs(self) -> Mapping[str, Any]:
        background = self.run.background.latest()
        return {"background": background.images.sha256 if background is not None else None}

    def shard_ids(self) -> Sequence[int]:
        """None at all when nothing is learned, or when there are so few images that nothing can be."""
        spec = self.settings.reduction
        too_few = spec.method == "flatten" and len(self.sample) < spec.min_images
        return range(0) if spec.method == "none" or too_few else super().shard_ids()

    @cached_property
    def encoder(self) -> ImageEncoder:
        networks = list_network_labels(self.run, self.settings)
        trained = find_trained(self.run, [*networks, TrainProjection.name, TrainCodebook.name])
        parts = {**load_models(self.run.store, trained), "encoder": encoder_part(self.settings)}
        return ImageEncoder.from_parts(parts, with_reduction=False)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        rows = list(self._describe(shard_id, worker))
        ids, vlads = [image_id for image_id, _ in rows], [vlad for _, vlad in rows]
        matrix = np.stack(vlads) if vlads else np.empty((0, self.encoder.dim), "<f2")
        tables = {}
        for number, block in enumerate(split_columns(matrix)):
            schema = sampled_vlads_schema(block.shape[1])
            tables[sampled_vlads_stage(number)] = pa.table(
                [ids, [row.tobytes() for row in block]], schema=schema
            )
        return ShardResult(tables=tables, report={"images": len(ids)})

    def _describe(self, shard_id: int, worker: WorkerSettings) -> Iterator[tuple[int, np.ndarray]]:
        deadline_s = self.settings.encode.image_deadline_s
        outcomes = prepare_images(
            self.images_of(shard_id), self.encoder.preprocessor.prepare, worker, deadline_s
        )
        for group in group_by_patches(outcomes):
            prepared = [(image, one) for image, one in group if isinstance(one, PreparedImage)]
            described = self.encoder.describe_prepared([one for _, one in prepared], with_points=False)
            for (image, _), one in zip(prepared, described, strict=True):
                yield image.image_id, one.vector.astype("<f2")


class SampledVlads(Sequence[np.ndarray]):
    """Blocks of columns (N, d) float16 in image order, each read when it is asked for."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.commits = [commit for _, commit in sorted(run.commits(SampleVlads.name).committed().items())]
        self.num_images = sum(commit.report["images"] for commit in self.commits)

    def __len__(self) -> int:
        return len(self.commits[0].files) if self.commits else 0

    @overload
    def __getitem__(self, position: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, position: slice) -> list[np.ndarray]: ...
    def __getitem__(self, position: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(position, slice):
            return [self[one] for one in range(*position.indices(len(self)))]
        if position >= len(self):
            raise IndexError(position)
        stage = sampled_vlads_stage(position)
        tables = (read_table(self.run.store, commit.files[stage]) for commit in self.commits)
        return np.concatenate([read_sampled_vlads(table) for table in tables])


class TrainReduction(Step):
    """What `reduction.method` asks for, as far as the images support it."""

    name = "train_reduction"
    version = 3
    sections = SampleVlads.sections

    def shard_ids(self) -> Sequence[int]:
        return range(1)

    def inputs(self) -> Mapping[str, Any]:
        return SampleVlads(self.run).inputs()

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        vlads, background = SampledVlads(self.run), self.run.background.latest() is not None
        learned = learn_reduction(vlads, vlads.num_images, self.settings.reduction, background=background)
        if learned is None:
            log.info("%d images: the VLAD is kept as it is", vlads.num_images)
            kept = ModelPart({"format": np.array([1], np.int32)}, {"method": "none"})
            return save_result(self.run, "reduction", kept)
        arrays, metadata = learned.to_part()
        metadata = {**metadata, "num_images": vlads.num_images, "background": background}
        log.info("the reduction: %s", metadata)
        return save_result(self.run, "reduction", ModelPart(arrays, metadata), **metadata)


def learn_reduction(
    vlads: Sequence[np.ndarray], num_images: int, spec: ReductionSpec, *, background: bool
) -> Reduction | None:
    """What `spec` asks for, as far as the images support it; None: the VLAD is kept as it is."""
    if spec.method == "none" or num_images == 0:
        return None
    if spec.method == "flatten":
        flattening = learn_flattening(vlads, background=background, min_images=spec.min_images)
        return flattening if flattening.mean.any() else None
    dim = min(spec.dim, int((num_images - 1) / spec.images_per_dim))
    if dim < spec.dim:  # planned were enough, but some could not be read
        log.warning("pca: %d readable images support %d dimensions, not %d", num_images, dim, spec.dim)
    return fit_projection_of_columns(vlads, ProjectionSpec(dim=dim, num_descriptors=max(2, num_images)))


def encoder_part(settings: Settings) -> ModelPart:
    """What an encoder is made of besides what is learned: the settings of a run as a model part."""
    metadata = encoder_metadata(
        make_preprocessor(settings),
        settings.channels,
        settings.points,
        intra_normalise=settings.vlad.intra_normalise,
        numerics=settings.numerics.model_dump(),
    )
    return ModelPart({"format": np.array([1], np.int32)}, metadata)
