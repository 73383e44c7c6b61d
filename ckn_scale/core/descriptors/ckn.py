"""CKN descriptors, ready to use: everything linear after the last pooling is one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn import CknEncoder, check_patches, encode_patches, pad_batches, parse_dtype
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.ckn_training import LayerStore, train_ckn
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, fit_projection, project_rows
from ckn_scale.core.specs import ChannelSpec, CknTrainingSpec


class Projector(NamedTuple):
    """A projection on its device, the network's last factor folded in."""

    matrix: Tensor  # (d, D)
    offset: Tensor  # (d,) float32


class CknDescriptor:
    """A CKN and its projection.

    The last layer's Nyström factor F and the projection L fold into L (I ⊗ F). The length of a
    descriptor before the projection is ‖F y‖; without a factor it is the length of y itself.
    """

    def __init__(
        self,
        ckn: Ckn,
        projection: Projection,
        batch_size: int = 64,
        device: str = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        self.ckn, self.projection = ckn, projection
        self._encoder = CknEncoder(ckn, batch_size=batch_size, device=device, dtype=parse_dtype(dtype))
        self._idle: SimpleQueue[CknEncoder] = SimpleQueue()
        self._idle.put(self._encoder)
        self._factor = find_folded_factor(ckn)
        self._projector = self.fold(projection)

    @property
    def name(self) -> str:
        return f"ckn-{self.ckn.spec.channel}"

    @property
    def dim(self) -> int:
        return self.projection.dim

    def fold(self, projection: Projection) -> Projector:
        """A projection ready for what this network gives; several may share the network."""
        if projection.input_dim != self.ckn.dim:
            raise ValueError(
                f"the projection takes {projection.input_dim} dims, the CKN gives {self.ckn.dim}"
            )
        matrix = torch.from_numpy(fold_factor(self._factor, projection)).to(self._encoder.out)
        return Projector(matrix, torch.from_numpy(projection.offset).to(matrix.device))

    def describe(self, patches: np.ndarray) -> np.ndarray:
        """uint8 (N, S, S, 3) → float32 (N, dim), unit rows; blank patches give zeros."""
        return self.describe_with(patches, ())[0]

    def describe_with(
        self, patches: np.ndarray, others: Sequence[Projector], executor: Executor | None = None
    ) -> list[np.ndarray]:
        """The same, and then by each of the other projections: a patch goes through the network once.

        Batches go one after the other, or beside each other in the threads of `executor`: the same bytes.
        """
        check_patches(patches, self.ckn)
        projectors = [self._projector, *others]
        outs = [np.empty((len(patches), len(one.matrix)), np.float32) for one in projectors]

        def describe_batch(numbered: tuple[int, np.ndarray]) -> None:
            start, batch = numbered
            count = min(len(batch), len(patches) - start)
            pooled = self._encode_batch(batch, count)
            for first in range(0, count, self._encoder.group):
                rows = slice(start + first, start + min(first + self._encoder.group, count))
                self._project_group(pooled[first : first + self._encoder.group], projectors, outs, rows)

        batches = pad_batches(patches, self._encoder.batch_size)
        for _ in map(describe_batch, batches) if executor is None else executor.map(describe_batch, batches):
            pass
        return outs

    def _encode_batch(self, batch: np.ndarray, count: int) -> Tensor:
        """By an encoder that is idle: each has the buffers for one batch."""
        try:
            encoder = self._idle.get_nowait()
        except Empty:
            encoder = self._encoder.duplicate()
        try:
            return encoder.encode_batch(batch, last_factor=self._factor is None, count=count)
        finally:
            self._idle.put(encoder)

    def _project_group(
        self, pooled: Tensor, projectors: Sequence[Projector], outs: Sequence[np.ndarray], rows: slice
    ) -> None:
        """The rows of one group, always as many, into `rows` of each projector's output."""
        with torch.inference_mode():
            norms = self._measure(pooled)
            for out, (matrix, offset) in zip(outs, projectors, strict=True):
                projected = project_rows(pooled, matrix, offset, norms)
                out[rows] = projected[: rows.stop - rows.start].cpu().numpy()

    def _measure(self, pooled: Tensor) -> Tensor:
        """Lengths of descriptors before the projection."""
        if self._factor is not None:
            cells = pooled.view(-1, len(self._factor)) @ self._factor.to(pooled).T
            pooled = cells.view(len(pooled), -1)
        lengths: Tensor = torch.linalg.vector_norm(pooled, dim=1, dtype=torch.float32)
        return lengths

    def to_part(self) -> ModelPart:
        """Both models as one; `from_part` reads it, `from_parts` reads them apart."""
        ckn, projection = self.ckn.to_part(), self.projection.to_part()
        arrays = {f"ckn.{name}": array for name, array in ckn.arrays.items()}
        arrays |= {f"projection.{name}": array for name, array in projection.arrays.items()}
        return ModelPart(arrays, {"ckn": ckn.metadata, "projection": projection.metadata})

    @classmethod
    def from_part(cls, part: ModelPart, **options: Any) -> CknDescriptor:
        """`options` are batch_size, device and dtype, which are no part of the model."""
        ckn = ModelPart(_strip_prefix(part.arrays, "ckn."), part.metadata["ckn"])
        projection = ModelPart(_strip_prefix(part.arrays, "projection."), part.metadata["projection"])
        return cls.from_parts(ckn, projection, **options)

    @classmethod
    def from_parts(cls, ckn: ModelPart, projection: ModelPart, **options: Any) -> CknDescriptor:
        return cls(Ckn.from_part(ckn), Projection.from_part(projection), **options)


def train_descriptor(
    patches: np.ndarray,
    channel: ChannelSpec,
    training: CknTrainingSpec,
    *,
    device: str = "cpu",
    store: LayerStore | None = None,
    **options: Any,
) -> CknDescriptor:
    """A channel learned from patches (N, S, S, 3) in one go; the training steps do the same in shards.

    `store` may have layers of it; `options` are batch_size and dtype.
    """
    ckn = train_ckn(patches[: training.num_patches], channel.ckn, training, device=device, store=store)
    rows = encode_patches(ckn, patches[: channel.projection.num_descriptors], device=device, **options)
    return CknDescriptor(ckn, fit_projection(rows, channel.projection), device=device, **options)


def find_folded_factor(ckn: Ckn) -> Tensor | None:
    """The last layer's factor, where a projection can take it in: a power of the descriptor is not linear."""
    factor = ckn.layers[-1].factor
    return None if factor is None or ckn.spec.descriptor_power != 1 else torch.from_numpy(factor)


def fold_factor(factor: Tensor | None, projection: Projection) -> np.ndarray:
    """The matrix (d, D) for descriptors without the factor."""
    if factor is None:
        return projection.matrix
    cells = projection.matrix.reshape(projection.dim, -1, len(factor)).astype(np.float64)
    folded: np.ndarray = (cells @ factor.double().numpy()).reshape(projection.dim, -1).astype(np.float32)
    return folded


def _strip_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
