"""`ckn-scale explain`: why a search does or does not find an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckn_scale.cli.options import AsJson, Run
from ckn_scale.cli.output import announce, print_json
from ckn_scale.cli.search import parse_box

if TYPE_CHECKING:
    import numpy as np

    from ckn_scale.runs.explain import Explanation
    from ckn_scale.search.engine import Index
    from ckn_scale.search.matches import ImageMatches


def explain(
    run: Run,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query image: a path or URI.")],
    expected: Annotated[
        str, typer.Argument(metavar="EXPECTED", help="An image of the run: its id, path or URI.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="A PNG of both images and their matches."),
    ] = None,
    box: Annotated[
        str | None, typer.Option(metavar="X1,Y1,X2,Y2", help="The part of the query that is searched for.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Hits of the search.")] = 10,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow one image through a search: the stage that loses it, or the rank it is found at.

    Says what each stage measures: similarity and rank among the nearest vectors, the score of shared words
    and the rank by both, matching points, those that one transform explains, and how many a match needs.

    \b
    ckn-scale explain run/ query.jpg photos/expected.jpg
    ckn-scale explain run/ query.jpg 1234 -o explain.png --json
    """
    from ckn_scale.evaluate.report import check_writable

    if out is not None:
        check_picture(out)
        check_writable(out)
    corners = None if box is None else parse_box(box, 1)
    announce(f"opening {run}", quiet=as_json)
    from ckn_scale.runs.explain import explain_search
    from ckn_scale.search.engine import open_index
    from ckn_scale.storage.run_folder import RunFolder

    index = open_index(run, version)
    asked = index.encode_query(query, corners)
    found, matches = explain_search(RunFolder.open(run), index, asked, expected, k=k)
    if out is not None and matches is not None:
        picture = _draw(index, query, corners, found, matches)
        save_picture(out, picture, quiet=as_json)
    if as_json:
        print_json({"version": index.version, "query": query, **found.to_body()})
    else:
        _print(found, drawn=out is None or matches is not None)


def check_picture(path: Path) -> None:
    from ckn_scale.errors import InputError

    if path.suffix.lower() != ".png":
        raise InputError(f"pictures are PNG files: --out must end in .png, got {path}")


def save_picture(path: Path, picture: np.ndarray, *, quiet: bool) -> None:
    """All of the file or nothing of it."""
    import cv2

    from ckn_scale.evaluate.report import write_file

    write_file(path, cv2.imencode(".png", picture[..., ::-1])[1].tobytes())
    if not quiet:
        print(f"{path}: {picture.shape[1]} × {picture.shape[0]}")


def _draw(
    index: Index, query: str, box: list[float] | None, found: Explanation, matches: ImageMatches
) -> np.ndarray:
    import numpy as np

    from ckn_scale.evaluate.pictures.figures import draw_matches

    every = np.arange(len(matches.query))
    images = (
        index.read_pixels(query, box),
        read_indexed(index, found.expected.image_id, found.expected.uri, matches.size_px),
    )
    caption = f"{Path(query).name}, {Path(found.expected.uri).name}: {found.sentence}"
    frames = (matches.first, matches.second)
    return draw_matches(images, frames, (every, every, matches.verified), caption=caption)


def read_indexed(index: Index, image_id: int, uri: str, size_px: tuple[int, int]) -> np.ndarray:
    """An indexed image as it was described; its thumbnail where its source is out of reach."""
    import cv2
    import numpy as np

    from ckn_scale.core.images import decode_jpeg
    from ckn_scale.errors import CknScaleError

    try:
        pixels = index.read_pixels(uri)
        if pixels.shape[1::-1] == size_px:
            return pixels
    except (CknScaleError, OSError):
        pass
    thumbnail = index.thumbnail(image_id)
    if thumbnail is None:
        return np.full((size_px[1], size_px[0], 3), 200, np.uint8)
    return cv2.resize(decode_jpeg(thumbnail), size_px, interpolation=cv2.INTER_CUBIC)


def _print(found: Explanation, *, drawn: bool) -> None:
    expected = found.expected
    print(f"{expected.uri} (image {expected.image_id}): {expected.state}")
    if found.query_points is not None:
        print(f"  points       {found.query_points} in the query, {found.expected_points} in the image")
    if found.similarity is not None:
        rank = "behind" if found.similarity_rank is None else f"rank {found.similarity_rank} of"
        print(
            f"  similarity   {found.similarity:.4f}, {rank} the {found.shortlist} nearest that are looked at"
        )
    if found.selective is not None:
        rank = "" if found.head_rank is None else f", rank {found.head_rank}; {found.head} are verified"
        print(f"  words        {found.selective:.4f}{rank}")
    if found.matches is not None:
        print(f"  matches      {found.matches}")
        print(f"  inliers      {found.inliers}; a match needs {found.min_inliers}")
    print(f"{found.stage}: {found.sentence}")
    if not drawn:
        print("no picture: there are no matches to draw")
