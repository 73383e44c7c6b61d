"""A CKN as a network of patches: everything linear after its last pooling is one matrix."""

from __future__ import annotations

from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn import CknEncoder, check_patches, parse_dtype
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.descriptors.network import PatchNetwork, Projector
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection


class CknNetwork(PatchNetwork):
    """The last layer's Nyström factor F and a projection L fold into L (I ⊗ F).

    The length of a descriptor before the projection is ‖F y‖; without a factor it is the length of y itself.
    """

    def __init__(
        self,
        ckn: Ckn,
        batch_size: int = 64,
        device: str = "cpu",
        dtype: str | torch.dtype = torch.float32,
    ) -> None:
        self.ckn, self.name, self.dim = ckn, f"ckn-{ckn.spec.channel}", ckn.dim
        self._encoder = CknEncoder(ckn, batch_size=batch_size, device=device, dtype=parse_dtype(dtype))
        self.batch_size, self.group = batch_size, self._encoder.group
        self.like = self._encoder.out.new_empty(0)
        self._idle: SimpleQueue[CknEncoder] = SimpleQueue()
        self._idle.put(self._encoder)
        self._factor = find_folded_factor(ckn)

    def check(self, patches: np.ndarray) -> None:
        check_patches(patches, self.ckn)

    def encode_batch(self, patches: np.ndarray, count: int) -> Tensor:
        return self._encode(patches, count, last_factor=True)

    def encode_unfolded(self, patches: np.ndarray, count: int) -> Tensor:
        return self._encode(patches, count, last_factor=self._factor is None)

    def measure(self, unfolded: Tensor) -> Tensor:
        if self._factor is not None:
            cells = unfolded.view(-1, len(self._factor)) @ self._factor.to(unfolded).T
            unfolded = cells.view(len(unfolded), -1)
        return super().measure(unfolded)

    def _encode(self, patches: np.ndarray, count: int, *, last_factor: bool) -> Tensor:
        """By an encoder that is idle: each has the buffers for one batch."""
        try:
            encoder = self._idle.get_nowait()
        except Empty:
            encoder = self._encoder.duplicate()
        try:
            return encoder.encode_batch(patches, last_factor=last_factor, count=count)
        finally:
            self._idle.put(encoder)

    def fold(self, projection: Projection) -> Projector:
        super().fold(projection)
        return self.place(fold_factor(self._factor, projection), projection.offset)

    def to_part(self) -> ModelPart:
        return self.ckn.to_part()


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
