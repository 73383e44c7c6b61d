"""What points are matched by: a projection of their descriptors and a vocabulary of their own.

VLAD wants few words and all directions of a descriptor; matching wants thousands of words and codes of a
few bytes. Both come from the same networks, so a patch goes through a network once
(`ProjectedDescriptor.describe_with`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, fit_projection
from ckn_scale.core.specs import PointsSpec, ProjectionSpec
from ckn_scale.core.vlad import fit_codebook


@dataclass(frozen=True)
class PointModel:
    """The projection of each channel that describes points, and the words of all of them side by side."""

    projections: Mapping[
        str, Projection
    ]  # by channel, in the order in which their numbers stand side by side
    centroids: np.ndarray  # (K, D) float32
    max_points: int  # of an image, the strongest

    def __post_init__(self) -> None:
        dim = sum(one.dim for one in self.projections.values())
        if self.centroids.ndim != 2 or self.centroids.shape[1] != dim:
            raise ValueError(f"the words of points must be (K, {dim}), got {self.centroids.shape}")

    @staticmethod
    def from_parts(parts: Mapping[str, ModelPart], points: Mapping[str, Any]) -> PointModel:
        """`points` as `encoder_metadata` has it; parts are points-projection-* and points-words."""
        projections = {
            name: Projection.from_part(parts[f"points-projection-{name}"]) for name in points["channels"]
        }
        centroids = np.ascontiguousarray(parts["points-words"].arrays["centroids"], np.float32)
        return PointModel(projections, centroids, points["max_points"])


def fit_point_projection(descriptors: np.ndarray, spec: PointsSpec) -> Projection:
    """Learned from raw rows (N, D) of one channel; `spec.dim` numbers, zeros where the data have fewer."""
    wanted = ProjectionSpec(spec.dim, spec.whitening, num_descriptors=max(2, len(descriptors)))
    found = fit_projection(descriptors, wanted)
    missing = spec.dim - found.dim
    return replace(
        found, matrix=np.pad(found.matrix, ((0, missing), (0, 0))), offset=np.pad(found.offset, (0, missing))
    )


def fit_point_words(descriptors: np.ndarray, num_images: int, spec: PointsSpec) -> np.ndarray:
    """Words (K, D) of projected rows (N, D) from `num_images` images, as many as these support."""
    num_words = spec.count_words(num_images, len(descriptors))
    return fit_codebook(descriptors, num_words, iterations=spec.kmeans_iterations, seed=spec.seed)
