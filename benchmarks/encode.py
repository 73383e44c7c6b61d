"""Patches per second of every channel and preset, as a share of the matrix-product rate of the same run.

    python benchmarks/encode.py [--presets paper compact] [--threads 1] [--seconds 2] [--json FILE]

The rate that the machine gives is that of 2048² products, measured between the channels; the share of
it counts the products of the network and its projection only (`count_flops`), so exponentials, pooling
and normalisation are overhead. Rivals are measured in turn, several rounds, the fastest counts: CPU time
on one thread, else time on the clock. OpenCV's SIFT descriptor is timed on one thread on one photograph,
without its pyramid: many keypoints less one.

Filters are random: speed does not depend on what they have learned.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from skimage import data

from ckn_scale.config import load_settings
from ckn_scale.core.ckn_model import (
    Ckn,
    CknLayer,
    count_flops,
    orientation_layer,
    subpatch_dim,
)
from ckn_scale.core.descriptors.ckn import CknNetwork
from ckn_scale.core.descriptors.network import ProjectedDescriptor
from ckn_scale.core.descriptors.sift import SiftNetwork
from ckn_scale.core.keypoints import Keypoints
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.pca import Projection
from ckn_scale.core.specs import ChannelSpec, CknSpec, LayerSpec, PatchSpec

BATCH = 64
PRODUCT_SIDE = 2048
ROUNDS = 5
SIFT_SIZE_PX = 51 / 12 * 2  # OpenCV's descriptor then covers as many pixels as a patch has


@dataclass
class Subject:
    """One thing to time; `seconds` is the least so far for a call on `count` items."""

    name: str
    run: Callable[[], object]
    count: int
    flops: int = 0  # of one item
    seconds: float = float("inf")

    @property
    def micros(self) -> float:
        return 1e6 * self.seconds / self.count

    @property
    def flops_per_s(self) -> float:
        return self.flops * self.count / self.seconds


def cut_patches(count: int, size_px: int) -> np.ndarray:
    """Patches around random points of a photograph, turned and scaled at random."""
    image, rng = data.astronaut(), np.random.default_rng(0)
    angles_rad, scales = rng.uniform(0, 2 * np.pi, count), rng.uniform(1.5, 4, count)
    frames = np.empty((count, 2, 3), np.float32)
    frames[:, 0, 0], frames[:, 0, 1] = scales * np.cos(angles_rad), -scales * np.sin(angles_rad)
    frames[:, 1, 0], frames[:, 1, 1] = -frames[:, 0, 1], frames[:, 0, 0]
    frames[:, :, 2] = rng.uniform(50, 460, (count, 2))
    keypoints = Keypoints(frames, np.ones(count, np.float32))
    return extract_patches(image, keypoints, PatchSpec(size_px=size_px))


def make_descriptor(channel: ChannelSpec, size_px: int) -> ProjectedDescriptor:
    rng = np.random.default_rng(0)
    spec = channel.ckn
    layers = tuple(make_layer(spec, index, rng) for index in range(len(spec.layers)))
    ckn = Ckn(spec, size_px, layers)
    dim = min(channel.projection.dim, ckn.dim)
    matrix = rng.standard_normal((dim, ckn.dim), np.float32)
    return ProjectedDescriptor(CknNetwork(ckn, batch_size=BATCH), Projection(matrix, matrix.mean(axis=1)))


def make_layer(spec: CknSpec, index: int, rng: np.random.Generator) -> CknLayer:
    layer: LayerSpec = spec.layers[index]
    if spec.channel == "grad" and index == 0:
        return orientation_layer(layer)
    weights = rng.standard_normal((layer.num_filters, subpatch_dim(spec, index)), np.float32)
    weights *= 4 / np.linalg.norm(weights, axis=1, keepdims=True)
    factor = np.eye(layer.num_filters, dtype=np.float32) if index + 1 < len(spec.layers) else None
    return CknLayer(layer, 0.5, weights, np.full(layer.num_filters, -4, np.float32), factor)


def make_channel_subject(preset: str, channel: ChannelSpec, size_px: int) -> Subject:
    descriptor, patches = make_descriptor(channel, size_px), cut_patches(BATCH, size_px)
    flops = count_flops(channel.ckn, size_px) + 2 * descriptor.projection.matrix.size
    return Subject(f"{preset} {channel.name}", lambda: descriptor.describe(patches), BATCH, flops)


def make_product_subject() -> Subject:
    left, right = torch.randn(2, PRODUCT_SIDE, PRODUCT_SIDE)
    out = torch.empty_like(left)
    return Subject("product", lambda: torch.mm(left, right, out=out), 1, 2 * PRODUCT_SIDE**3)


def make_sift_subjects() -> tuple[Subject, Subject]:
    """OpenCV's descriptor at many points and at one: the difference has no pyramid in it."""
    grey, sift = cv2.cvtColor(data.astronaut(), cv2.COLOR_RGB2GRAY), cv2.SIFT_create()  # type: ignore[attr-defined]
    grid = [(float(x), float(y)) for x in range(40, 470, 12) for y in range(40, 470, 12)]
    points = [cv2.KeyPoint(x, y, SIFT_SIZE_PX, 0.0) for x, y in grid]
    many = Subject("OpenCV SIFT", lambda: sift.compute(grey, points), len(points) - 1)
    return many, Subject("OpenCV SIFT, one point", lambda: sift.compute(grey, points[:1]), 1)


def measure(subjects: list[Subject], seconds: float, clock: Callable[[], float]) -> None:
    """Every subject in turn, for several rounds."""
    for subject in subjects:
        subject.run()
    for _ in range(ROUNDS):
        for subject in subjects:
            until = time.perf_counter() + seconds / ROUNDS
            while time.perf_counter() < until:
                start = clock()
                subject.run()
                subject.seconds = min(subject.seconds, clock() - start)


def report(subjects: list[Subject], product: Subject, sift_us: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"{'':<16}{'µs/patch':>10}{'patches/s':>11}{'MFLOP':>9}{'share of product rate':>23}{'× SIFT':>8}")
    for one in subjects:
        share, ratio = one.flops_per_s / product.flops_per_s, one.micros / sift_us
        flops = one.flops / 1e6
        speed = f"{one.micros:>10.1f}{1e6 / one.micros:>11.0f}"
        print(f"{one.name:<16}{speed}{flops:>9.2f}{share:>23.2f}{ratio:>8.2f}")
        row = {"name": one.name, "micros": one.micros, "mflop": flops, "share": share, "times_sift": ratio}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["paper", "compact"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per subject")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cv2.setNumThreads(1)
    product, (many, one) = make_product_subject(), make_sift_subjects()
    subjects = []
    for preset in arguments.presets:
        settings = load_settings(preset)
        subjects += [make_channel_subject(preset, c, settings.patches.size_px) for c in settings.channels]
    patches = cut_patches(BATCH, 51)
    subjects.append(Subject("our SIFT", lambda: SiftNetwork().describe(patches), BATCH))
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    measure([product, many, one, *subjects], arguments.seconds, clock)
    sift_us = 1e6 * (many.seconds - one.seconds) / many.count
    print(f"{arguments.threads} thread(s); products: {product.flops_per_s / 1e9:.1f} GFLOP/s")
    print(f"OpenCV's SIFT descriptor, one thread: {sift_us:.1f} µs")
    rows = report(subjects, product, sift_us)
    if arguments.json:
        facts = {"threads": arguments.threads, "gflops": product.flops_per_s / 1e9, "opencv_sift_us": sift_us}
        arguments.json.write_text(json.dumps({**facts, "results": rows}, indent=2))


if __name__ == "__main__":
    main()
