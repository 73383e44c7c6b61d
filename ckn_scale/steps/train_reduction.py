"""Train: what is done to the VLAD, learned from the sample or the background. One shard."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckn_scale.core.encoder import Reduction
from ckn_scale.core.flattening import learn_flattening
from ckn_scale.core.projection import fit_projection_of_columns
from ckn_scale.core.specs import ProjectionSpec, ReductionSpec
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.model_parts import save_result
from ckn_scale.steps.plan_background import read_background
from ckn_scale.steps.sample_vlads import SampledVlads, SampleVlads

log = logging.getLogger(__name__)


class TrainReduction(Step):
    name = "train_reduction"
    version = 3
    sections = SampleVlads.sections

    def shard_ids(self) -> Sequence[int]:
        return range(1)

    def inputs(self) -> Mapping[str, Any]:
        return SampleVlads(self.run).inputs()

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        vlads, background = SampledVlads(self.run), read_background(self.run) is not None
        learned = learn_reduction(vlads, vlads.num_images, self.settings.reduction, background=background)
        if learned is None:
            log.info("%d images: the VLAD is kept as it is", vlads.num_images)
            return save_result(self.run, "reduction", {"format": np.array([1], np.int32)}, {"method": "none"})
        arrays, facts = learned.to_arrays()
        facts |= {"num_images": vlads.num_images, "background": background}
        log.info("the reduction: %s", facts)
        return save_result(self.run, "reduction", arrays, facts, **facts)


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
