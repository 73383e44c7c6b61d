"""Descriptors at two levels, which do not always agree: regions of scenes, and whole images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckn_scale.config import Settings, find_channels
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import Member, Request
from ckn_scale.evaluate.image_sets import read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place
from ckn_scale.evaluate.patch_table import PatchTable
from ckn_scale.evaluate.scenes import read_scenes
from ckn_scale.evaluate.training_images import find_images

RIVAL = "rootsift"
CACHE_BYTES = int(60e9)


@dataclass(frozen=True)
class Scores:
    """Mean average precision in points."""

    regions: float  # of scenes, descriptors side by side
    images: float  # VLAD with unit blocks, mean of three codebooks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenes", type=Path, required=True, help="scenes with homographies")
    parser.add_argument("--images", type=Path, required=True, help="a folder named like the Holidays set")
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--points", type=int, default=200, help="of an image")
    parser.add_argument("--region", type=float, default=8.0, help="of all, in detection scales")
    parser.add_argument("--cache", type=Path, help="what `ckn-scale evaluate` has computed is used again")
    parser.add_argument("--json", type=Path)


def measure_both(
    requests: Sequence[Request], settings: Settings, arguments: argparse.Namespace
) -> dict[str, Scores]:
    """Every request and RootSIFT, on the same points at one region."""
    cache, train = ContentCache(arguments.cache, CACHE_BYTES), find_images(arguments.train_images)
    rows = [Request(RIVAL, (Member(RIVAL, settings, *find_channels(settings, RIVAL)),)), *requests]
    scenes = read_scenes(arguments.scenes)
    patch_cells = PatchTable(scenes, rows, settings, train, cache, report_progress).measure(
        [arguments.region], [0.0]
    )
    images = read_image_set(arguments.images, "holidays")
    table = ImageTable(images, rows, settings, train, cache, report_progress, intra_choices=[True])
    image_cells = table.measure([Place(arguments.region, None)])
    return {
        row.name: Scores(
            100 * patch_cells[row.name][0].mean_ap, 100 * image_cells[row.name, "none"][0].mean_score
        )
        for row in rows
    }


def report_progress(what: str, done: int, total: int) -> None:
    """A line for each thing that is done: some take their time."""
    if done == total:
        print(f"  {what}", flush=True)
