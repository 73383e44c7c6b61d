"""A network describes patches; projections of what it gives make the rows that are used.

Every network runs in batches of one shape, the last one padded, so that a row depends on its patch alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ckn_scale.core.ckn import pad_batches
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.pca import Projection, project_rows


class Projector(NamedTuple):
    """A projection on its device, ready for what its network gives."""

    matrix: Tensor  # (d, D)
    offset: Tensor  # (d,) float32


class PatchNetwork(ABC):
    """Describes patches before any projection; blank patches give zeros."""

    name: str
    dim: int
    batch_size: int
    group: int  # rows that are projected together, always as many: a divisor of the batch
    like: Tensor  # empty, of the device and type it computes with

    @abstractmethod
    def check(self, patches: np.ndarray) -> None:
        """ValueError unless it can describe these patches."""

    @abstractmethod
    def encode_batch(self, patches: np.ndarray, count: int) -> Tensor:
        """`batch_size` patches → (batch_size, dim); only the first `count` rows mean anything."""

    @abstractmethod
    def to_part(self) -> ModelPart:
        """The model that `load_network` reads."""

    def encode_unfolded(self, patches: np.ndarray, count: int) -> Tensor:
        """The same in the form that `fold` makes projections for."""
        return self.encode_batch(patches, count)

    def measure(self, unfolded: Tensor) -> Tensor:
        """The lengths (B,) of descriptors before they are projected."""
        lengths: Tensor = torch.linalg.vector_norm(unfolded, dim=1, dtype=torch.float32)
        return lengths

    def fold(self, projection: Projection) -> Projector:
        """A projection ready for what this network gives; several may share the network."""
        if projection.input_dim != self.dim:
            raise ValueError(
                f"the projection takes {projection.input_dim} dims, {self.name} gives {self.dim}"
            )
        return self.place(projection.matrix, projection.offset)

    def place(self, matrix: np.ndarray, offset: np.ndarray) -> Projector:
        placed = torch.from_numpy(matrix).to(self.like)
        return Projector(placed, torch.from_numpy(offset).to(placed.device))

    def describe(self, patches: np.ndarray) -> np.ndarray:
        """uint8 (N, S, S, 3) → float32 (N, dim), before any projection."""
        return self._collect(patches, [self.dim], lambda batch, count: [self.encode_batch(batch, count)])[0]

    def project(
        self, patches: np.ndarray, projectors: Sequence[Projector], executor: Executor | None = None
    ) -> list[np.ndarray]:
        """Unit rows (N, d) by each of the projections: a patch goes through the network once.

        Batches go one after the other, or beside each other in the threads of `executor`: the same bytes.
        """

        def project_batch(batch: np.ndarray, count: int) -> list[Tensor]:
            unfolded = self.encode_unfolded(batch, count)
            starts = range(0, count, self.group)
            groups = [self._project_group(unfolded[one : one + self.group], projectors) for one in starts]
            return [torch.cat(one) for one in zip(*groups, strict=True)]

        return self._collect(patches, [len(one.matrix) for one in projectors], project_batch, executor)

    def _project_group(self, unfolded: Tensor, projectors: Sequence[Projector]) -> list[Tensor]:
        lengths = self.measure(unfolded)
        return [project_rows(unfolded, matrix, offset, lengths) for matrix, offset in projectors]

    def _collect(
        self,
        patches: np.ndarray,
        dims: Sequence[int],
        encode: Callable[[np.ndarray, int], list[Tensor]],
        executor: Executor | None = None,
    ) -> list[np.ndarray]:
        self.check(patches)
        outs = [np.empty((len(patches), dim), np.float32) for dim in dims]

        def encode_numbered(numbered: tuple[int, np.ndarray]) -> None:
            start, batch = numbered
            count = min(len(batch), len(patches) - start)
            with torch.inference_mode():
                for out, rows in zip(outs, encode(batch, count), strict=True):
                    out[start : start + count] = rows[:count].float().cpu().numpy()

        batches = pad_batches(patches, self.batch_size)
        for _ in (map if executor is None else executor.map)(encode_numbered, batches):
            pass
        return outs


def make_network_part(
    name: str, arrays: Mapping[str, np.ndarray], smoothing_px: float | None = None
) -> ModelPart:
    """The model of a network that is no CKN: its weights, and the smoothing of patches (none: its own)."""
    form = {"format": np.array([1], np.int32)}  # a file has to hold something
    return ModelPart({**arrays, **form}, {"network": name, "smoothing_px": smoothing_px})


class ProjectedDescriptor:
    """A network and one projection of what it gives."""

    def __init__(self, network: PatchNetwork, projection: Projection) -> None:
        self.network, self.projection = network, projection
        self._projector = network.fold(projection)

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def dim(self) -> int:
        return self.projection.dim

    def describe(self, patches: np.ndarray) -> np.ndarray:
        """uint8 (N, S, S, 3) → float32 (N, dim), unit rows; blank patches give zeros."""
        return self.describe_with(patches, ())[0]

    def describe_with(
        self, patches: np.ndarray, others: Sequence[Projector], executor: Executor | None = None
    ) -> list[np.ndarray]:
        """The same, and then by each of the other projections of the network."""
        return self.network.project(patches, [self._projector, *others], executor)

    def to_part(self) -> ModelPart:
        """Both models as one; `split_part` takes them apart."""
        parts = {"network": self.network.to_part(), "projection": self.projection.to_part()}
        arrays = {f"{key}.{name}": one for key, part in parts.items() for name, one in part.arrays.items()}
        return ModelPart(arrays, {key: part.metadata for key, part in parts.items()})


def split_part(part: ModelPart) -> Iterator[ModelPart]:
    """The network's and the projection's part of a descriptor's."""
    for key in ("network", "projection"):
        yield ModelPart(_strip_prefix(part.arrays, f"{key}."), part.metadata[key])


def _strip_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
