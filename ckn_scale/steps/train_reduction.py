"""Train: PCA + whitening of the VLAD, as far as the sample supports it. One shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ckn_scale.core.projection import fit_projection
from ckn_scale.core.specs import ProjectionSpec
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.model_parts import save_result
from ckn_scale.steps.sample_vlads import SampleVlads, read_vlads, supported_dim

log = logging.getLogger(__name__)


class TrainReduction(Step):
    name = "train_reduction"
    sections = SampleVlads.sections

    def shard_ids(self) -> Sequence[int]:
        return range(1)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        vlads = read_vlads(self.run)
        dim = supported_dim(len(vlads), self.settings.reduction)
        if dim is None or dim >= vlads.shape[1]:
            log.info("%d sampled images support no reduction: the VLAD is kept", len(vlads))
            return save_result(self.run, "reduction", {"format": np.array([1], np.int32)}, {"identity": True})
        spec = ProjectionSpec(dim=dim, whitening=1.0, num_descriptors=len(vlads))
        arrays, facts = fit_projection(vlads, spec).to_arrays()
        return save_result(self.run, "reduction", arrays, {**facts, "identity": False}, dim=dim)
