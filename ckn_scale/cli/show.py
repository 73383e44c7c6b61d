"""`ckn-scale show`: pictures of what the detector and the descriptors see, as PNG files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckn_scale.cli.explain import check_picture
from ckn_scale.cli.options import Run, SettingsOptions, spread_options
from ckn_scale.cli.output import announce
from ckn_scale.cli.progress import ProgressDisplay
from ckn_scale.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from ckn_scale.config import Settings
    from ckn_scale.core.keypoints import Keypoints
    from ckn_scale.evaluate.regions import KeyedDescriptor
    from ckn_scale.search.engine import Answer, Index
    from ckn_scale.search.evidence import Query

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write pictures: regions, patches, matches, hits, filters, the inputs of the networks, robustness.",
)

ImagePath = Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")]
Points = Annotated[int, typer.Option(min=1, max=5000, help="How many of the strongest regions.")]
TrainImages = Annotated[
    Path | None, typer.Option(help="Photographs that CKNs learn on; by default the images shown.")
]


@dataclass(frozen=True)
class PictureOptions(SettingsOptions):
    """What every picture takes."""

    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The PNG; <verb>.png by default.")
    ] = None


@app.command()
@spread_options
def keypoints(
    image: ImagePath,
    *,
    points: Points = 150,
    options: PictureOptions,
) -> None:
    """The regions that the detector finds.

    \b
    ckn-scale show keypoints photo.jpg --points 200 -o regions.png
    """
    out, settings = prepare_picture(options, "keypoints", points)
    from ckn_scale.evaluate.pictures.figures import draw_keypoints

    pixels, found = detect(image, settings)
    kind = settings.keypoints.detector
    caption = f"{image.name}: the {len(found)} strongest regions ({kind}), blue fine, red coarse"
    save(out, draw_keypoints(pixels, found, caption=caption))


@app.command()
@spread_options
def patches(
    image: ImagePath,
    *,
    points: Points = 16,
    options: PictureOptions,
) -> None:
    """Regions and the rectified patches they become.

    \b
    ckn-scale show patches photo.jpg --points 25
    """
    out, settings = prepare_picture(options, "patches", points)
    from ckn_scale.core.patches import extract_patches
    from ckn_scale.evaluate.pictures.figures import draw_patches, spread_keypoints

    pixels, found = detect(image, settings, spare=8)
    chosen = spread_keypoints(found, points)
    squares, spec = extract_patches(pixels, chosen, settings.patches), settings.patches
    size = f"{spec.size_px} x {spec.size_px} pixels"
    caption = f"{image.name}: squares of half side {spec.region:g} s, rectified to {size}"
    save(out, draw_patches(pixels, chosen, squares, spec.region, caption=caption))


@app.command()
@spread_options
def matches(
    first: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Another one.")],
    *,
    descriptor: Annotated[str, typer.Option(help="As `ckn-scale evaluate patches` names them.")] = "ckn-grad",
    points: Points = 800,
    train_images: TrainImages = None,
    options: PictureOptions,
) -> None:
    """Mutual nearest regions of two images; green: one affine map or homography explains them.

    Prints the inliers, the transform from IMAGE to OTHER, and the box around the inliers there.

    \b
    ckn-scale show matches a.jpg b.jpg --descriptor ckn-grad+ckn-white --train-images photos/
    """
    out, settings = prepare_picture(options, "matches", points)
    from ckn_scale.core.patches import extract_patches
    from ckn_scale.evaluate.pictures.figures import draw_matches, match_images

    describe = fit_descriptor(descriptor, options, settings, train_images, [first, second])
    images, found, rows = [], [], []
    for path in (first, second):
        pixels, points_found = detect(path, settings)
        images.append(pixels)
        found.append(points_found.frames)
        rows.append(describe(extract_patches(pixels, points_found, settings.patches)))
    sizes = [(one.shape[1], one.shape[0]) for one in images]
    i, j, verified = match_images((rows[0], rows[1]), (found[0], found[1]), (sizes[0], sizes[1]))
    agree = f"{len(i)} mutual matches, {len(verified.inliers)} inliers"
    if verified.transform is not None:
        agree += f" of one {verified.kind}"
    caption = f"{first.name}, {second.name}: {descriptor}, {agree}"
    picture = draw_matches((images[0], images[1]), (found[0], found[1]), (i, j, verified), caption=caption)
    save(out, picture)
    print(agree)
    if verified.transform is None or verified.box is None:
        print("no transform: so few agree by chance")
        return
    names = [
        f"{path.name} ({size[0]} × {size[1]})" for path, size in zip((first, second), sizes, strict=True)
    ]
    print(f"transform of pixels, {names[0]} → {names[1]}:")
    for row in verified.transform.tolist():
        print("  " + " ".join(f"{value:14.7g}" for value in row))
    print(f"box in {second.name}: " + ", ".join(f"{value:.0f}" for value in verified.box))


@app.command()
def hits(
    run: Run,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The query image: a path or URI.")],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The PNG; hits.png by default.")
    ] = Path("hits.png"),
    k: Annotated[int, typer.Option("-k", min=1, max=100, help="How many hits.")] = 10,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
) -> None:
    """What a search finds: the query beside each hit, with the points that agree and the box around them.

    \b
    ckn-scale show hits run/ query.jpg -o hits.png -k 12
    """
    from ckn_scale.evaluate.report import check_writable

    check_picture(out)
    check_writable(out)
    announce(f"opening {run}")
    from ckn_scale.search.engine import open_index

    index = open_index(run, version)
    query = index.encode_query(image)
    answer = index.search_queries([query], k)[0]
    save(out, _draw_hits(index, query, answer, image))


def _draw_hits(index: Index, query: Query, answer: Answer, name: str) -> np.ndarray:
    import numpy as np

    from ckn_scale.evaluate.pictures.sheets import MatchedTile, draw_hits
    from ckn_scale.search.matches import match_images

    ids, none = [hit.image_id for hit in answer], np.empty((0, 2))
    matched = (
        match_images(index.shards, query.points, ids)
        if answer.verified and query.points is not None
        else None
    )
    tiles = []
    for place, hit in enumerate(answer):
        thumbnail = index.thumbnail(hit.image_id)
        image = np.full((120, 160, 3), 230, np.uint8) if thumbnail is None else decode_thumbnail(thumbnail)
        caption = f"{hit.score:.3f} {Path(hit.uri).name}"
        if matched is None or query.points is None or not hit.match:
            verdict = "" if matched is None else "no match: "
            tiles.append(MatchedTile(image, none, none, None, f"{place + 1}. {verdict}{caption}"))
            continue
        one = matched[place]
        inliers, size = one.verified.inliers, np.array(one.size_px)
        points = (
            one.first[inliers, :, 2] / np.array(query.points.size_px),
            one.second[inliers, :, 2] / size,
        )
        box = one.verified.box
        shares = None if box is None else tuple((np.array(box) / np.tile(size, 2)).tolist())
        tiles.append(MatchedTile(image, *points, shares, f"{place + 1}. {one.inliers} inliers: {caption}"))
    found = {True: "found", False: "nothing found", None: "by vectors alone"}[answer.found]
    caption = f"{Path(name).name}: {found}; {len(index)} images in version {index.version}"
    return draw_hits(index.read_pixels(name), tiles, columns=2, caption=caption)


def decode_thumbnail(data: bytes) -> np.ndarray:
    from ckn_scale.core.images import decode_jpeg

    return decode_jpeg(data)


@app.command()
@spread_options
def filters(
    train_images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="A folder of photographs to learn on.")
    ],
    *,
    channel: Annotated[Literal["raw", "white"], typer.Option(help="Whose first layer.")] = "raw",
    options: PictureOptions,
) -> None:
    """The filters that the first layer of CKN-raw (or -white) learns.

    \b
    ckn-scale show filters photos/ --preset paper --set training.solver=nystrom
    """
    out, settings = prepare_picture(options, "filters", None)
    from ckn_scale.evaluate.pictures.figures import draw_filters

    keyed = fit_members(f"ckn-{channel}", options, settings, train_images, [])[0]
    network: Any = keyed.descriptor.network
    count = len(network.ckn.layers[0].weights)
    caption = f"CKN-{channel}: {count} filters of the first layer, learned on {train_images.name}"
    save(out, draw_filters(network.ckn, caption=caption))


@app.command()
@spread_options
def inputs(
    image: ImagePath,
    *,
    points: Points = 10,
    options: PictureOptions,
) -> None:
    """What the three networks look at: colours, whitened colours, gradients.

    \b
    ckn-scale show inputs photo.jpg --points 12
    """
    out, settings = prepare_picture(options, "inputs", points)
    from ckn_scale.core.patches import extract_patches
    from ckn_scale.evaluate.pictures.figures import draw_inputs, spread_keypoints

    pixels, found = detect(image, settings, spare=8)
    squares = extract_patches(pixels, spread_keypoints(found, points), settings.patches)
    caption = f"{image.name}: the input maps (grad: hue is direction, brightness length)"
    save(out, draw_inputs(squares, caption=caption))


@app.command()
@spread_options
def robustness(
    image: ImagePath,
    *,
    descriptors: Annotated[
        str, typer.Option(help="As `ckn-scale evaluate patches` names them.")
    ] = "sift,rootsift,ckn-grad,ckn-white",
    points: Points = 300,
    train_images: TrainImages = None,
    options: PictureOptions,
) -> None:
    """Descriptor distance against rotation, zoom and translation of the patch.

    \b
    ckn-scale show robustness photo.jpg --train-images photos/
    """
    out, settings = prepare_picture(options, "robustness", points)
    from ckn_scale.evaluate.pictures.chart import require_matplotlib
    from ckn_scale.evaluate.pictures.robustness import DISTURBANCES, draw_robustness, measure_robustness

    require_matplotlib()  # before the descriptors are learned
    pixels, found = detect(image, settings)
    names = [name.strip() for name in descriptors.split(",") if name.strip()]
    curves: dict[str, dict[str, np.ndarray]] = {one.title: {} for one in DISTURBANCES}
    for name in names:
        describe = fit_descriptor(name, options, settings, train_images, [image])
        for one in DISTURBANCES:
            curves[one.title][name] = measure_robustness(pixels, found, describe, settings.patches, one)
    caption = (
        f"distance to the undisturbed patch, 1 = two unlike patches; {len(found)} regions of {image.name}"
    )
    save(out, draw_robustness(curves, caption=caption))


def prepare_picture(options: PictureOptions, verb: str, points: int | None) -> tuple[Path, Settings]:
    """Where the picture goes and the settings, with at most `points` regions; refused before any work."""
    path = options.out or Path(f"{verb}.png")
    if path.suffix.lower() != ".png":
        raise InputError(f"pictures are PNG files: --out must end in .png, got {path}")
    from ckn_scale.evaluate.report import check_writable

    check_writable(path)
    settings = options.load(*([] if points is None else [f"keypoints.max_keypoints={points}"]))
    announce("loading what describes images")
    from ckn_scale.core.numerics import set_compute_threads

    set_compute_threads(settings.numerics.threads)
    return path, settings


def detect(path: Path, settings: Settings, *, spare: int = 1) -> tuple[np.ndarray, Keypoints]:
    """Pixels at working size and their regions; `spare` times as many, to choose from."""
    from dataclasses import replace

    from ckn_scale.core.preprocessor import detect_keypoints
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.regions import ImageFile, RegionReader

    reader = RegionReader(settings.images, settings.keypoints, settings.patches, ContentCache())
    pixels = reader.decode(ImageFile(path))
    limit = settings.keypoints.max_keypoints * spare
    found = detect_keypoints(pixels, replace(settings.keypoints, max_keypoints=limit))
    if len(found) == 0:
        raise InputError(f"{path} is flat: the detector found no region")
    return pixels, found


def fit_members(
    name: str, options: PictureOptions, settings: Settings, train_images: Path | None, shown: list[Path]
) -> list[KeyedDescriptor]:
    """The descriptors that a name stands for, learned on the training images or on those shown."""
    from ckn_scale.evaluate.cache import ContentCache
    from ckn_scale.evaluate.descriptors import fit_member, parse_requests
    from ckn_scale.evaluate.regions import RegionReader
    from ckn_scale.evaluate.training_images import TrainingPatches, find_images

    requests = parse_requests(name, lambda preset: options.load(preset=preset) if preset else settings)
    if len(requests) != 1:
        raise InputError(f"one descriptor is wanted, got {name!r}")
    paths = shown if train_images is None else find_images(train_images)
    cache = ContentCache()
    reader = RegionReader(settings.images, settings.keypoints, settings.patches, cache)
    with ProgressDisplay() as display:
        training = TrainingPatches(paths, reader, display.show_count)
        return [
            fit_member(member, None, training.source(settings.patches.region, member.settings.sample), cache)
            for member in requests[0].members
        ]


def fit_descriptor(
    name: str, options: PictureOptions, settings: Settings, train_images: Path | None, shown: list[Path]
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from patches to their descriptors, one row each."""
    import numpy as np

    fitted = fit_members(name, options, settings, train_images, shown)

    def describe(patches: np.ndarray) -> np.ndarray:
        return np.concatenate([one.descriptor.describe(patches) for one in fitted], axis=1)

    return describe


def save(path: Path, picture: np.ndarray) -> None:
    """All of the file or nothing of it."""
    import cv2

    from ckn_scale.evaluate.report import write_file

    write_file(path, cv2.imencode(".png", picture[..., ::-1])[1].tobytes())
    print(f"{path}: {picture.shape[1]} × {picture.shape[0]}")
