"""What a run will take: memory of a worker, size of the run folder, time, cores per GPU.

A few sampled images go through the real path (read, decode, detect, extract, describe with a small
network of the right sizes) in a subprocess, so that its peak memory is measured too.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.core.ckn import encode_patches
from ckn_scale.core.ckn_training import train_ckn
from ckn_scale.core.codebook import fit_codebook
from ckn_scale.core.descriptors.ckn import CknDescriptor
from ckn_scale.core.encoder import Channel, ImageEncoder, PreparedImage
from ckn_scale.core.images import encode_thumbnail
from ckn_scale.core.projection import fit_projection
from ckn_scale.core.specs import ChannelSpec
from ckn_scale.core.threads import set_compute_threads
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.errors import ImageRejected
from ckn_scale.interrupts import signals_blocked
from ckn_scale.schemas import BYTES_PER_CODE, BYTES_PER_FRAME
from ckn_scale.spawn import SPAWN
from ckn_scale.steps.plan import PlannedImage, read_sample, read_segments
from ckn_scale.steps.prepare_images import prepare_image
from ckn_scale.steps.sample_patches import make_front
from ckn_scale.storage.run_folder import RunFolder

NUM_IMAGES = 8
NUM_PATCHES = 2000  # enough for the sizes of the networks, not for their quality


@dataclass(frozen=True)
class Estimate:
    """Measured on a few images; per image unless said otherwise."""

    num_images: int
    usable_images: int
    prepare_s: float  # of one core
    describe_s: float  # of the device
    worker_memory_mb: float
    stored_bytes: float

    def lines(self) -> list[str]:
        worker_s = self.num_images * (self.prepare_s + self.describe_s)
        return [
            f"an image takes {1000 * self.prepare_s:.0f} ms to read, detect and cut, "
            f"{1000 * self.describe_s:.0f} ms to describe (measured on {self.usable_images} images)",
            f"{self.num_images} images: {_duration(worker_s)} of one worker; divide by their number",
            f"memory of a worker: about {self.worker_memory_mb:.0f} MB",
            f"run folder: about {self.num_images * self.stored_bytes / 1e6:.1f} MB",
            f"cores that keep one device busy: {max(1.0, self.prepare_s / max(self.describe_s, 1e-9)):.1f}",
        ]


def estimate_run(run: RunFolder, settings: Settings) -> Estimate:
    """Measure a few sampled images in a process of its own; the figures go into the event log."""
    segments = read_segments(run)
    images = read_sample(run, segments)[:NUM_IMAGES]
    with signals_blocked():
        pool = SPAWN.Pool(1)
    with pool:
        measured = pool.apply(_measure, (images, settings))
    estimate = replace(measured, num_images=sum(segment.num_images for segment in segments))
    run.events.write("estimate", **asdict(estimate))
    run.events.flush()
    return estimate


def _measure(images: Sequence[PlannedImage], settings: Settings) -> Estimate:
    set_compute_threads(settings.numerics.threads)
    front = make_front(settings)
    prepare_image(images[0], front.prepare)  # what is imported or cached on first use
    began = time.perf_counter()
    outcomes = [prepare_image(image, front.prepare) for image in images]
    prepare_s = (time.perf_counter() - began) / max(len(images), 1)
    prepared = [outcome for outcome in outcomes if not isinstance(outcome, ImageRejected)]
    if not prepared:
        return Estimate(0, 0, prepare_s, 0.0, _peak_memory_mb(), 0.0)
    encoder = make_rehearsal_encoder(settings, prepared)
    encoder.encode_prepared(prepared[:1])
    began = time.perf_counter()
    encoded = encoder.encode_prepared(prepared, max_points=settings.encode.max_descriptors)
    describe_s = (time.perf_counter() - began) / len(prepared)
    points = sum(len(one.words) for one in encoded) / len(encoded)
    side_px = settings.encode.thumbnail_side_px
    thumbnail = sum(len(encode_thumbnail(one.image, side_px)) for one in prepared) / len(prepared)
    reduction = settings.reduction
    dim = min(encoder.dim, reduction.dim) if reduction.method == "pca" else encoder.dim
    # a vector lies in the run twice: in its stage and in the index (float16 as float32); a thumbnail too
    vector_bytes = make_codec(reduction.stored, dim).code_bytes * (2 if reduction.stored == "signs" else 3)
    stored = vector_bytes + points * (BYTES_PER_FRAME + 2 + BYTES_PER_CODE) + 2 * thumbnail
    return Estimate(0, len(prepared), prepare_s, describe_s, _peak_memory_mb(), stored)


def make_rehearsal_encoder(settings: Settings, prepared: Sequence[PreparedImage]) -> ImageEncoder:
    """An encoder of the right sizes, learned in seconds from a few images: for its cost, not its quality."""
    patches = np.concatenate([one.patches for one in prepared])[:NUM_PATCHES]
    channels = tuple(_rehearse_channel(settings, channel, patches) for channel in settings.channels)
    return ImageEncoder(make_front(settings), channels, settings.vlad.intra_normalise, None)


def _rehearse_channel(settings: Settings, channel: ChannelSpec, patches: np.ndarray) -> Channel:
    numerics = settings.numerics
    training = replace(settings.training, solver="nystrom", num_subpatches=20_000, kmeans_iterations=1)
    ckn = train_ckn(patches, channel.ckn, training, device=numerics.device)
    options: dict[str, Any] = {
        "batch_size": numerics.batch_patches,
        "device": numerics.device,
        "dtype": numerics.dtype,
    }
    raw = encode_patches(ckn, patches[:256], **options)
    descriptor = CknDescriptor(ckn, fit_projection(raw, channel.projection), **options)
    words = min(settings.vlad.num_words, 64)
    centroids = fit_codebook(descriptor.describe(patches[:256]), words, iterations=1, seed=0)
    return Channel(descriptor, centroids, weight=1.0)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _peak_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
