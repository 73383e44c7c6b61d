"""How many rows each step of a run works on and stores: what its time and bytes grow with, in a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckn_scale.config import Settings
from ckn_scale.core.evidence import HEAD
from ckn_scale.core.specs import CknTrainingSpec


@dataclass(frozen=True)
class StepCost:
    seconds: float  # of one core, or of the device
    stored_bytes: float


class Size(NamedTuple):
    """What a step's time and what its bytes grow with, in a line."""

    work: float
    stored: float


def list_sizes(
    settings: Settings,
    num_sampled: int,
    num_images: int,
    num_patches: float,
    num_background: int | None = None,
) -> dict[str, Size]:
    """The rows that each step works on and stores, by `num_patches` sampled patches."""
    training, channels = settings.training, settings.channels
    raw = sum(min(channel.num_descriptors, num_patches) for channel in channels)
    points = min(settings.points.num_descriptors, num_patches) if settings.point_channels else 0
    words = count_point_words(settings, num_sampled, num_patches)
    projected = len(channels) * min(settings.vlad.num_descriptors, num_patches)
    described = raw + projected + len(settings.point_channels) * points
    queries = min(settings.publish.num_queries, num_images)
    spec = settings.reduction
    taught_by = num_sampled if num_background is None else num_background
    too_few = spec.method == "flatten" and taught_by < spec.min_images
    fitted = 0 if spec.method == "none" or too_few else min(taught_by, spec.num_images)
    return {
        "sample_patches": Size(num_sampled, num_patches),
        "draw_subpatches": Size(min(training.num_patches, num_patches), training.num_subpatches),
        "search_rates": Size(training.num_subpatches if training.solver == "sgd" else 0, 0),
        "train_layer": Size(training.num_subpatches, 0),
        "take_networks": Size(0, 0),
        "describe_patches": Size(described, described),
        "train_projection": Size(raw, 0),
        "train_codebook": Size(projected, 0),
        "train_point_words": Size(points * words, 0),
        "sample_vlads": Size(fitted, fitted),
        "train_reduction": Size(fitted, 0),
        "encode_images": Size(num_images, num_images),
        "build_index": Size(num_images, num_images),
        "plant_queries": Size(queries, queries),
        "certify_index": Size(queries * _count_verified(settings, num_images), 0),
    }


def _count_verified(settings: Settings, num_images: int) -> int:
    """Images that a planted query is compared with by points: the head of each index shard, and few more."""
    held = settings.plan.images_per_shard * settings.index.shards_per_index_shard
    return -(-num_images // held) * min(num_images, held, 3 * HEAD // 2)


def count_point_words(settings: Settings, num_sampled: int, num_patches: float) -> int:
    """How many words the points get that are matched."""
    return settings.points.count_words(num_sampled, int(min(settings.points.num_descriptors, num_patches)))


def count_sgd_steps(training: CknTrainingSpec) -> dict[str, float]:
    """SGD's steps for one layer of one channel, by pipeline step; none where the closed form is used.

    Rates that diverge are given up early, so searching takes less rather than more.
    """
    if training.solver != "sgd":
        return {}
    validation = training.sgd_validation_pairs / training.sgd_batch_pairs / 2  # there is no way back
    tried = training.sgd_validate_every + (training.sgd_validate_every // 100 + 2) * validation
    blocks = -(-training.sgd_iterations // training.sgd_validate_every)
    return {
        "search_rates": training.sgd_rate_candidates * tried,
        "train_layer": training.sgd_iterations + (blocks + 1) * validation,
    }
