"""`ckn-scale build-patches`: sets with ground truth from a reconstruction, as the paper made RomePatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckn_scale.cli.options import SettingsOptions
from ckn_scale.cli.output import announce

if TYPE_CHECKING:
    from ckn_scale.evaluate.builders.patch_set import Tracked


@dataclass(frozen=True)
class DrawOptions:
    """How much is drawn, and what counts as the same point."""

    points: Annotated[int, typer.Option(min=1, help="Points of either split, evenly of its scenes.")] = 1000
    views: Annotated[int, typer.Option(min=2, help="Of a point: one query, the others are targets.")] = 10
    num_images: Annotated[int, typer.Option(min=1, help="Query images of either split; as many targets.")] = (
        1000
    )
    tolerance_px: Annotated[
        float, typer.Option(min=0.1, help="Of epipolar lines and reprojections, in the cameras' pixels.")
    ] = 3.0
    test_share: Annotated[
        float, typer.Option(min=0, max=0.9, help="Of the scenes that are for tests; 0: all are for training.")
    ] = 1 / 3
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0


def build_patches(
    reconstruction: Annotated[
        Path,
        typer.Argument(
            metavar="RECONSTRUCTION", help="A model of COLMAP or Bundler, or a folder of them: a scene each."
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new local folder; never overwritten.")],
    *,
    images: Annotated[
        Path | None, typer.Option(help="What names of images are relative to; by default the model's folder.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that detect and describe.")] = 2,
    cache: Annotated[Path | None, typer.Option(help="Regions and descriptors are kept there.")] = None,
    drawn: DrawOptions,
    options: SettingsOptions,
) -> None:
    """Patch- and image-retrieval sets from a COLMAP or Bundler reconstruction, split by scene.

    Hessian-Affine regions, SIFT matches that are mutually nearest, within 3 pixels of each other's epipolar
    line, joined while one 3D point explains them; then points with 10 views or more are drawn. OUT/train and
    OUT/test have patches/, for `evaluate patches --protocol rome`, and images/, for `evaluate images
    --protocol groups`. What was detected is kept, so a second call is short.

    \b
    ckn-scale build-patches colmap/sparse/ rome/ --images photos/
    ckn-scale evaluate patches rome/test/patches --protocol rome --train-images photos/
    """
    import time

    from ckn_scale.storage.output_folders import check_output

    check_output(out)
    settings = options.load()
    announce(f"reading {reconstruction}")
    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.core.numerics import set_compute_threads
    from ckn_scale.evaluate.builders.patch_set import BuildPlan, make_reader, track_scene, write_set
    from ckn_scale.evaluate.builders.reconstructions import read_reconstructions
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.machine import describe_machine
    from ckn_scale.evaluate.report import write_json
    from ckn_scale.storage.output_folders import new_folder

    set_compute_threads(settings.numerics.threads)
    started, reader = time.monotonic(), make_reader(settings, ContentCache(cache))
    plan = BuildPlan(
        drawn.points, drawn.views, drawn.num_images, drawn.tolerance_px, drawn.test_share, drawn.seed
    )
    scenes = read_reconstructions(reconstruction, images)
    with ProgressDisplay() as display, new_folder(out) as folder:
        show = display.show_count
        tracked = [track_scene(scene, reader, plan, show, workers=workers) for scene in scenes]
        splits = write_set(folder, tracked, reader, plan, show)
        content = {
            "reconstruction": str(reconstruction.absolute()),
            "splits": splits,
            "scenes": {scene.name: scene.facts for scene in tracked},
            "plan": vars(plan),
            "seconds": round(time.monotonic() - started, 1),
            "machine": describe_machine(),
            "settings": settings.model_dump(mode="json"),
        }
        write_json(folder / "build.json", content)
    _print(tracked, splits, out, drawn.views)


def _print(tracked: Sequence[Tracked], splits: Mapping[str, Any], out: str, views: int) -> None:
    from ckn_scale.evaluate.report import format_table

    facts = list(tracked[0].facts)
    rows = [[scene.name, *(f"{scene.facts[name]:,}" for name in facts)] for scene in tracked]
    print(format_table(["scene", *(name.replace("_", " ") for name in facts)], rows))
    for split, counts in splits.items():
        print(
            f"{out}/{split}: {counts['points']} points of {views} views, {counts['query_images']} query and "
            f"{counts['target_images']} target images of {len(counts['scenes'])} scenes"
        )
