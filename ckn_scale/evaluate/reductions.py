"""What is done to a VLAD before it is stored, judged on images that it was not learned on.

Every form is learned on `others`, photographs that are not in the set, and applied to both queries
and database; what is stored of the database is quantised, queries stay exact, as in the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckn_scale.core.flattening import learn_flattening
from ckn_scale.core.pca import fit_projection_of_columns, split_columns
from ckn_scale.core.specs import ProjectionSpec
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import build_signs
from ckn_scale.errors import InputError


@dataclass(frozen=True)
class Reduced:
    """One form of the vectors: its name, what it takes, and how similar it finds queries and database."""

    name: str  # "none", "flatten", "signs" (flattened, then one bit a number), "pca"
    dim: int
    stored_bytes: int  # of one image
    similarities: np.ndarray  # (Q, N)


def check_dims(dims: Sequence[int], num_images: int) -> None:
    """InputError for a PCA to more dimensions than there are images to learn it on."""
    for dim in dims:
        if dim >= num_images:
            raise InputError(
                f"--dim {dim} needs more than {dim} images to learn on, and better ten times as many; "
                f"--reduction-images has {num_images}"
            )


def reduce_vectors(
    queries: np.ndarray, database: np.ndarray, others: np.ndarray, dims: Sequence[int]
) -> Iterator[Reduced]:
    """Flattened, its signs, and a PCA to each of `dims`; of VLADs (Q, D), (N, D) and, to learn on, (M, D)."""
    flattening = learn_flattening(others, background=True, min_images=2)
    asked, kept = flattening.apply(queries), flattening.apply(database)
    yield Reduced("flatten", flattening.dim, 2 * flattening.dim, asked @ kept.T)
    yield Reduced("signs", flattening.dim, *keep_signs(asked, kept))
    for dim in dims:
        projection = fit_projection_of_columns(split_columns(others), ProjectionSpec(dim=dim, whitening=1.0))
        similarities = projection.apply(queries) @ projection.apply(database).T
        yield Reduced("pca", projection.dim, 2 * projection.dim, similarities)


def keep_signs(queries: np.ndarray, database: np.ndarray) -> tuple[int, np.ndarray]:
    """Bytes an image, and similarities (Q, N) as the index finds them, not by a formula of its own."""
    dim = database.shape[1]
    codec = SignCodec(dim)
    index = build_signs(codec.encode(database), np.arange(len(database)), dim)
    found, positions = index.search(queries, k=len(database))
    similarities = np.empty_like(found)
    np.put_along_axis(similarities, positions, found, axis=1)
    return codec.code_bytes, similarities
