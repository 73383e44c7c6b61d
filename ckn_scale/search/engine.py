"""Open a published index in this process and ask it for images.

index = ckn_scale.open_index("s3://bucket/run")
for hit in index.search("photo.jpg", k=5):
    ...  # hit.uri, hit.score
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ckn_scale.core.encoder import ImageEncoder
from ckn_scale.core.threads import require_device, set_compute_threads
from ckn_scale.search.cache import FileCache
from ckn_scale.search.shard import Hit, ShardGroup
from ckn_scale.search.versions import open_version
from ckn_scale.storage.image_sources import read_image
from ckn_scale.storage.index_files import IndexManifest
from ckn_scale.storage.models import ModelFile, load_model
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

Box = Sequence[float]  # x1, y1, x2, y2 in pixels of the upright image


class Index:
    """One published version: the encoder of queries and all index shards."""

    def __init__(self, version: int, encoder: ImageEncoder, shards: ShardGroup) -> None:
        self.version = version
        self._encoder = encoder
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.rows

    def vector(self, image_id: int) -> np.ndarray | None:
        """The (D,) vector of an indexed image, None when there is none."""
        return self._shards.vector(image_id)

    def search(
        self, image: str | Path | bytes | np.ndarray, k: int = 10, box: Box | None = None
    ) -> list[Hit]:
        """The k most alike indexed images, best first. `image`: a path or URI, a file's bytes, or RGB pixels.

        Raises ImageRejected when the image cannot be read or shows nothing to describe.
        """
        encoded = self._encoder.encode_bytes(_image_bytes(image), box)
        return self.search_vector(encoded.vector, k)

    def search_vector(self, vector: np.ndarray, k: int = 10) -> list[Hit]:
        """The k most alike images for a vector that was encoded before."""
        return self._shards.search(vector[None], k)[0]

    def thumbnail(self, image_id: int) -> bytes | None:
        """The JPEG thumbnail of an indexed image, None when there is none."""
        return self._shards.thumbnail(image_id)


def open_index(
    run_url: str | os.PathLike[str],
    version: int | None = None,
    *,
    threads: int = 1,
    device: str | None = None,
    cache_folder: Path | None = None,
) -> Index:
    """Open the current (or a given) published version of a run.

    `threads` is what torch, OpenCV and FAISS may use in this process; `device` overrides where the
    run was encoded ("cpu" opens on a laptop what a GPU cluster built).
    """
    set_compute_threads(threads)
    run = RunFolder.open(os.fspath(run_url))
    published = open_version(run, version)
    encoder = load_encoder(run.store, published.manifest, device=device)
    cache = FileCache(cache_folder)
    shards = ShardGroup(run.store, published.manifest, threads=threads, cache=cache)
    return Index(published.number, encoder, shards)


def load_encoder(store: Store, manifest: IndexManifest, *, device: str | None = None) -> ImageEncoder:
    """The encoder whose vectors the index holds."""
    parts: dict[str, tuple[Mapping[str, np.ndarray], Mapping[str, Any]]] = {
        name: load_model(store, ModelFile(name, file["path"], file["sha256"]))
        for name, file in manifest.models.items()
    }
    arrays, facts = parts["encoder"]
    numerics = {**facts["numerics"], **({"device": device} if device else {})}
    require_device(numerics["device"])
    parts["encoder"] = (arrays, {**facts, "numerics": numerics})
    return ImageEncoder.from_parts(parts)


def _image_bytes(image: str | Path | bytes | np.ndarray) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        return _encode_png(image)
    return read_image(os.fspath(image))


def _encode_png(pixels: np.ndarray) -> bytes:
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or pixels.shape[2:] == (3,)):
        raise ValueError(f"pixels must be (H, W) or (H, W, 3) uint8 RGB, got {pixels.shape} {pixels.dtype}")
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, format="PNG", compress_level=1)
    return sink.getvalue()
