"""How small the networks may be: mAP against FLOPs, on regions and on whole images.

    python benchmarks/sizes.py --scenes OXFORD_AFFINE --images HOLIDAYS --train-images PHOTOS [--png FILE]

`compact` with other numbers of filters in its second layers and other dimensions of its projections, and
`paper` (filters by the closed form), all as grad + white on the same points at the same region. FLOPs are
those of the matrix products of networks and projections (`count_flops`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything that starts a thread pool

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from both_levels import RIVAL, Scores, add_arguments, measure_both

from ckn_scale.config import Settings, load_settings
from ckn_scale.core.ckn_model import count_flops, layer_sides
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.specs import ChannelSpec
from ckn_scale.evaluate.descriptors import Member, Request

SIZES = {  # filters of layer two, by the dimension of a descriptor
    64: (16, 64),
    128: (16, 32, 64, 128),
    256: (32, 64, 128, 256),
    512: (64, 128),
}
CHANNELS = ("grad", "white")
# The closed form needs no more patches than this; the paper's numbers are for its gradient descent.
PAPER = ['training.solver="nystrom"', "training.num_patches=30000", "training.num_subpatches=300000"]
PAPER_DESCRIPTORS = 6000  # to learn its projections from: 50,176 numbers each
SAMPLE = ["sample.num_patches=30000", "vlad.num_words=64", "vlad.num_descriptors=30000"]


@dataclass(frozen=True)
class Size:
    """One row: a preset's channels at one size."""

    name: str
    settings: Settings
    channels: tuple[ChannelSpec, ...]

    @property
    def mflop(self) -> float:
        """Of one patch."""
        side_px = self.settings.patches.size_px
        return sum(count_channel(channel, side_px) for channel in self.channels) / 1e6

    @property
    def request(self) -> Request:
        members = (Member(f"{self.name} {one.name}", self.settings, one) for one in self.channels)
        return Request(self.name, tuple(members))


def count_channel(channel: ChannelSpec, size_px: int) -> int:
    """FLOPs of the network and its projection."""
    pooled_side, filters = layer_sides(channel.ckn, size_px)[-1][1], channel.ckn.layers[-1].num_filters
    return count_flops(channel.ckn, size_px) + 2 * pooled_side**2 * filters * channel.projection.dim


def resize(channel: ChannelSpec, filters: int, dim: int) -> ChannelSpec:
    """The same channel with another number of filters in its last layer, projected to another dimension."""
    *below, last = channel.ckn.layers
    layers = (*below, replace(last, num_filters=filters))
    projection = replace(channel.projection, dim=dim)
    return replace(channel, ckn=replace(channel.ckn, layers=layers), projection=projection)


def list_sizes(points: int, with_paper: bool) -> list[Size]:
    common = [*SAMPLE, f"keypoints.max_keypoints={points}"]
    compact = load_settings("compact", None, common)
    sizes = [
        Size(
            f"{compact_name(dim)}, {filters}",
            compact,
            tuple(resize(one, filters, dim) for one in compact.channels),
        )
        for dim, choices in SIZES.items()
        for filters in choices
    ]
    if with_paper:
        paper = load_settings("paper", None, [*PAPER, *common])
        chosen = (limit_descriptors(one) for one in paper.channels if one.name in CHANNELS)
        sizes.append(Size("paper", paper, tuple(chosen)))
    return sizes


def compact_name(dim: int) -> str:
    return f"compact to {dim}"


def limit_descriptors(channel: ChannelSpec) -> ChannelSpec:
    return replace(channel, projection=replace(channel.projection, num_descriptors=PAPER_DESCRIPTORS))


def draw(sizes: Sequence[Size], scores: dict[str, Scores], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for axis, level in zip(axes, ("regions", "images"), strict=True):
        for label, marker in (*((compact_name(dim), "o-") for dim in SIZES), ("paper", "s")):
            chosen = [size for size in sizes if size.name.partition(",")[0] == label]
            heights = [getattr(scores[size.name], level) for size in chosen]
            axis.plot([size.mflop for size in chosen], heights, marker, label=label)
        axis.axhline(getattr(scores[RIVAL], level), ls="--", color="grey", label="RootSIFT")
        axis.set(xscale="log", xlabel="MFLOP a patch", ylabel="mAP", title=level)
        axis.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--no-paper", action="store_true", help="it takes half an hour of a core")
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    set_compute_threads(1)
    sizes = list_sizes(arguments.points, not arguments.no_paper)
    scores = measure_both([size.request for size in sizes], sizes[0].settings, arguments)
    print(f"{arguments.points} points an image, region {arguments.region:g}")
    print(f"{'':<20}{'MFLOP/patch':>12}{'GFLOP/image':>13}{'regions mAP':>13}{'images mAP':>12}")
    for size in sizes:
        cost, found = f"{size.mflop:>12.2f}{size.mflop * arguments.points / 1e3:>13.2f}", scores[size.name]
        print(f"{size.name:<20}{cost}{found.regions:>13.1f}{found.images:>12.1f}")
    print(f"{RIVAL:<45}{scores[RIVAL].regions:>13.1f}{scores[RIVAL].images:>12.1f}")
    if arguments.png:
        draw(sizes, scores, arguments.png)
    if arguments.json:
        rows = [{"name": size.name, "mflop": size.mflop, **asdict(scores[size.name])} for size in sizes]
        arguments.json.write_text(json.dumps({"results": rows, RIVAL: asdict(scores[RIVAL])}, indent=2))


if __name__ == "__main__":
    main()
