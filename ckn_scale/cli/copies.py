"""`ckn-scale copies`: groups of near-copies in a published version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckn_scale.cli.options import AsJson, Run, WorkerOptions
from ckn_scale.cli.output import print_json

if TYPE_CHECKING:
    import numpy as np

    from ckn_scale.runs.copies import Copies
    from ckn_scale.search.versions import PublishedVersion
    from ckn_scale.storage.run_folder import RunFolder

TILES_SHOWN = 8  # of a group, in the contact sheet
KEPT_COLOUR = (0, 158, 115)


def copies(
    run: Run,
    workers: WorkerOptions,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="A new local folder for copies.parquet, copies.csv and copies.png.",
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Similarity that copies have at least; by default what stands out in the run."
        ),
    ] = None,
    min_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of an image's points that agree with a copy of it; 0: whatever shows the same scene.",
        ),
    ] = 0.15,
    max_groups_shown: Annotated[
        int, typer.Option(min=0, max=1000, help="Of the largest groups, printed and in the contact sheet.")
    ] = 20,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Images that are near-copies of each other: equal, resized, cropped, recompressed, edited.

    Every image is compared with every other, two index shards at a time, on as many workers as there are.
    Pairs that stand out from the collection are verified by geometry where the run keeps points, and make
    groups. What is compared is recorded in the run: the same command goes on where it stopped, and after
    an append only what is new is compared. copies.csv: group, images, image_id, uri, representative (the one
    with most pixels: the one to keep), score and inliers with the member most like it.

    \b
    ckn-scale copies run/
    ckn-scale copies run/ --output copies/
    ckn-scale copies s3://bucket/run --output copies/ --ray auto --workers 64
    ckn-scale copies run/ --min-share 0          # also other photographs of the same scene
    ckn-scale copies run/ --min-score 0.9 --json
    """
    with workers.open_driver(run) as driver:
        from ckn_scale import pipeline
        from ckn_scale.runs.copies import group_copies
        from ckn_scale.search.versions import open_version
        from ckn_scale.storage.output_folders import check_output

        if output is not None:
            check_output(output, driver.run)
        published = open_version(driver.run, version)
        compared = pipeline.find_copies(driver, published.record.manifest, min_score)
        found = group_copies(compared, min_share)
    if output is not None:
        _write(driver.run, published, output, found, max_groups_shown)
    if as_json:
        print_json(_describe(driver.run, published, found, max_groups_shown, output))
    else:
        _print(published, found, max_groups_shown, output)


def _write(run: RunFolder, published: PublishedVersion, output: str, found: Copies, shown: int) -> None:
    """The tables and the contact sheet, in a folder that is there as a whole or not at all."""
    import cv2

    from ckn_scale.runs.copies import write_copies
    from ckn_scale.storage.output_folders import new_folder

    with new_folder(output, run) as folder:
        write_copies(folder, found)
        if shown and found.groups:
            sheet = _draw(run, published, found, shown)
            (folder / "copies.png").write_bytes(cv2.imencode(".png", sheet[..., ::-1])[1].tobytes())


def _draw(run: RunFolder, published: PublishedVersion, found: Copies, shown: int) -> np.ndarray:
    from ckn_scale.evaluate.pictures.sheets import Tile, draw_sheet
    from ckn_scale.search.shard import open_shards_of

    groups = [rows[:TILES_SHOWN] for rows in found.largest(shown)]
    wanted = [row["image_id"] for rows in groups for row in rows]
    index = open_shards_of(run.store, published.manifest, wanted)
    sheet = []
    for rows in groups:
        tiles = [
            Tile(
                index.thumbnail(row["image_id"]),
                f"{row['score']:.2f} {Path(row['uri']).name}",
                KEPT_COLOUR if row["representative"] else None,
            )
            for row in rows
        ]
        sheet.append((f"{rows[0]['images']} images, group {rows[0]['group']}", tiles))
    caption = f"{found.groups} groups of near-copies; the {len(sheet)} largest; green: most pixels"
    return draw_sheet(sheet, caption=caption)


def _describe(
    run: RunFolder, published: PublishedVersion, found: Copies, shown: int, output: str | None
) -> dict[str, Any]:
    return {
        "run": run.url,
        "version": published.number,
        "images": found.images,
        "candidates": found.candidates,
        "verified": found.verified,
        "groups": found.groups,
        "removable": found.removable,
        "largest": [{"group": rows[0]["group"], "images": rows} for rows in found.largest(shown)],
        "folder": output,
    }


def _print(published: PublishedVersion, found: Copies, shown: int, output: str | None) -> None:
    by = "by vectors alone: the run keeps no points" if found.verified is None else "verified by geometry"
    pairs = found.candidates if found.verified is None else found.verified
    print(f"version {published.number}: {found.images} images; {pairs} pairs of near-copies, {by}")
    print(f"{found.groups} groups of {len(found.table)} images; {found.removable} could go")
    for rows in found.largest(shown):
        _print_group(rows)
    if found.groups > shown:
        print(f"… and {found.groups - shown} more groups")
    if output is not None:
        print(f"in {output}: copies.parquet, copies.csv" + (", copies.png" if found.groups and shown else ""))


def _print_group(rows: Sequence[dict[str, Any]]) -> None:
    print(f"group {rows[0]['group']}, {len(rows)} images")
    for row in rows[:TILES_SHOWN]:
        verified = "" if row["inliers"] is None else f"  {row['inliers']:4} inliers"
        kept = "  (most pixels)" if row["representative"] else ""
        print(f"  {row['score']:.3f}{verified}  {row['uri']}{kept}")
    if len(rows) > TILES_SHOWN:
        print(f"  … and {len(rows) - TILES_SHOWN} more")
