"""What each study varies: a few lines here; how it is measured, kept and drawn is the same for all.

A setting is written as `--set` takes it; `{grad}` stands for the place of that channel in the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckn_scale.evaluate.studies.rendered import CHANGES

WHITENINGS = {"none": 0, "semi": 0.5, "full": 1}
DIMS = (16, 32, 64, 128, 256, 512, 1024)
REGIONS = (4, 5.2, 8, 10, 12, 14, 16)
DENSE = 'keypoints.detector="dense"'


@dataclass(frozen=True)
class Variant:
    """One measurement: a point of a curve, or a cell of a table."""

    panel: str  # a chart of its own
    series: str  # a curve
    x: float | str
    descriptor: str
    settings: tuple[str, ...] = ()
    region: float | None = None  # none: the preset's
    crop: bool = True  # Oxford: the query is its box
    change: tuple[str, float] | None = None  # of rendered pairs instead of the data's own


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    list_variants: Callable[[Sequence[str]], Iterator[Variant]]  # from the descriptors that are asked for
    descriptors: str
    protocols: tuple[str, ...] = ("mikolajczyk", "rome", "holidays", "ukbench", "oxford", "groups")
    x_label: str = ""  # by default the name of the panel


def vary_network(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Figure "exploration": each hyper-parameter of CKN-grad around the preset's own."""
    layers, every_position = "channels.{grad}.ckn.layers", "channels.{grad}.ckn.position_step=1"
    grids = {
        "orientations": (f"{layers}.0.num_filters", (6, 8, 10, 12, 16, 20)),
        "pooling of layer one": (f"{layers}.0.subsampling", (2, 3, 4, 5)),
        "sub-patch of layer two": (f"{layers}.1.patch_px", (1, 2, 3, 4, 5)),
        "pooling of layer two": (f"{layers}.1.subsampling", (1, 2, 3, 4)),
        "filters of layer two": (f"{layers}.1.num_filters", (32, 64, 128, 256, 512, 1024)),
        "quantile for α": ("channels.{grad}.ckn.alpha_quantile", (0.0001, 0.001, 0.01, 0.1, 0.3)),
    }
    for panel, (path, values) in grids.items():
        for value in values:
            yield Variant(panel, "ckn-grad", value, "ckn-grad", (every_position, f"{path}={value}"))


def vary_projection(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Figure "CKNPCA": dimensions × whitening; the network below is learned once."""
    for name in descriptors:
        path = f"channels.{{{name.removeprefix('ckn-')}}}.projection"
        for whitening, power in WHITENINGS.items():
            for dim in DIMS:
                yield Variant(name, whitening, dim, name, (f"{path}.dim={dim}", f"{path}.whitening={power}"))


def vary_points(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Table "dense": Hessian-Affine points, a grid, and a grid with pooling larger by one in each layer."""
    for name in descriptors:
        yield Variant("points", name, "Hessian-Affine", name)
        yield Variant("points", name, "dense, same pooling", name, (DENSE,))
        if name.startswith("ckn-"):
            yield Variant("points", name, "dense, changed pooling", name, (DENSE, f"+pooling={name[4:]}"))


def vary_crop(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Table "oxford_dense": queries cut to their box or whole; dense points with changed pooling."""
    for name in descriptors:
        dense = (DENSE, f"+pooling={name[4:]}") if name.startswith("ckn-") else (DENSE,)
        settings_of: dict[str, tuple[str, ...]] = {"Hessian-Affine": (), "dense": dense}
        for points, settings in settings_of.items():
            for crop in (False, True):
                x = f"{points}, {'crop' if crop else 'no crop'}"
                yield Variant("queries", name, x, name, settings, crop=crop)


def vary_orientation(descriptors: Sequence[str]) -> Iterator[Variant]:
    """What "up is up" is worth."""
    for name in descriptors:
        for orientation in ("dominant", "gravity"):
            yield Variant("orientation", name, orientation, name, (f'keypoints.orientation="{orientation}"',))


def vary_region(descriptors: Sequence[str]) -> Iterator[Variant]:
    """How much of its surroundings a patch shows."""
    for name in descriptors:
        for region in REGIONS:
            yield Variant("half side in detection scales", name, region, name, region=region)


def vary_training(descriptors: Sequence[str]) -> Iterator[Variant]:
    """From how many patches filters and projections are learned."""
    for name in descriptors:
        channel = f"channels.{{{name.removeprefix('ckn-')}}}.projection.num_descriptors"
        for count in (100, 300, 1000, 3000, 10_000, 30_000):
            settings = (
                f"training.num_patches={count}",
                f"{channel}={count}",
                f"sample.num_patches={max(count, 2)}",
            )
            yield Variant("training patches", name, count, name, settings)


def vary_supervision(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Table "supervision": what labels, surrogate classes or none at all give."""
    for name in descriptors:
        yield Variant("descriptor", "all", name, name)


def vary_changes(descriptors: Sequence[str]) -> Iterator[Variant]:
    """Figure "robustness", as matching: photographs beside a blurred, relit, turned or scaled copy."""
    for kind, amounts in CHANGES.items():
        for name in descriptors:
            for amount in amounts:
                yield Variant(kind, name, amount, name, change=(kind, amount))


DETECTED = ("mikolajczyk", "holidays", "ukbench", "oxford", "groups")  # rome's patches are cut already
BOTH, CKNS = "sift,ckn-grad,ckn-white", "ckn-grad,ckn-white"
STUDIES = {
    study.name: study
    for study in (
        Study("network", "hyper-parameters of CKN-grad", vary_network, "ckn-grad"),
        Study("projection", "PCA dimensions × whitening", vary_projection, CKNS, x_label="dimensions"),
        Study("dense", "dense points with the same and with changed pooling", vary_points, BOTH, DETECTED),
        Study("crop", "cropped and whole queries", vary_crop, "sift,ckn-grad", ("oxford",)),
        Study("gravity", "dominant orientation against gravity", vary_orientation, BOTH, DETECTED),
        Study(
            "context", "how much a region shows around its point", vary_region, f"rootsift,{BOTH}", DETECTED
        ),
        Study("training", "amount of training data", vary_training, CKNS),
        Study(
            "supervision",
            "unsupervised, surrogate and supervised descriptors",
            vary_supervision,
            "sift,rootsift,ckn-grad,ckn-white,philippnet,deepcompare-siam,alexnet-conv3",
        ),
        Study("robustness", "blur, light, turn and scale", vary_changes, f"rootsift,{BOTH}", ("photos",)),
    )
}
