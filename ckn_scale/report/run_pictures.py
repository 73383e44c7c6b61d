"""Pictures of a run: the filters of its networks, and planted queries that were answered rightly or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.images import decode_jpeg, encode_jpeg
from ckn_scale.errors import CknScaleError
from ckn_scale.evaluate.pictures.figures import draw_filters, draw_orientation_filters
from ckn_scale.report.html import Element, make, make_figure, make_section
from ckn_scale.report.pictures import show_answer, show_drawing, show_pixels
from ckn_scale.runs.explain import find_image
from ckn_scale.search.engine import Index, open_index
from ckn_scale.search.shard import Hit
from ckn_scale.steps.draw_queries import QueryOutcome, read_outcomes
from ckn_scale.steps.plant_queries import JPEG_QUALITY
from ckn_scale.storage.models import load_model
from ckn_scale.storage.run_folder import RunFolder

HITS_SHOWN = 5
NETWORK = "ckn-"  # what the names of such models begin with


def list_run_pictures(run: RunFolder, num_examples: int, *, title: str = "") -> Iterator[Element]:
    """Sections with pictures; none before there are models, no examples before there is a version."""
    begin = f"{title}: " if title else ""
    if filters := list(_draw_networks(run)):
        yield make_section(f"{begin}Filters", *filters)
    version = run.versions.latest()
    if version is None or version.certificate.outcomes is None or not num_examples:
        return
    outcomes = read_outcomes(run, version.certificate.outcomes)[0]
    if examples := list(_show_examples(run, outcomes, num_examples)):
        yield make_section(f"{begin}Misses and hits", *examples)


def _draw_networks(run: RunFolder) -> Iterator[Element]:
    generation = run.models.latest()
    for name, file in sorted(generation.models.items()) if generation is not None else ():
        if not name.startswith(NETWORK):
            continue
        ckn = Ckn.from_part(load_model(run.store, name, file))
        if ckn.spec.channel != "grad":
            layer = ckn.layers[0].spec
            what = f"{layer.num_filters} filters of layer one, {layer.patch_px} × {layer.patch_px} pixels"
            picture = draw_filters(ckn, caption=name)
        elif len(ckn.layers) > 1:
            layer = ckn.layers[1].spec
            what = f"filters of layer two, {layer.patch_px} × {layer.patch_px} cells, a ray per orientation"
            picture = draw_orientation_filters(ckn, caption=name)
        else:
            continue
        yield make_figure(show_drawing(picture, f"{name}: {what}"), f"{name}: {what}.")


def _show_examples(run: RunFolder, outcomes: Sequence[QueryOutcome], count: int) -> Iterator[Element]:
    """Of either kind the first `count` by id, asked again of the current version."""
    missed = [one for one in outcomes if one.outcome == "missed"][:count]
    first = [one for one in outcomes if one.outcome != "missed"][:count]
    index, num_missed = open_index(run.url), sum(one.outcome == "missed" for one in outcomes)
    yield make(
        "p",
        f"Planted queries: rendered views of indexed images, of which {num_missed} of {len(outcomes)} were "
        "missed. They are asked again here; green: the image itself, dashed orange: another one (which may "
        "show the same thing).",
    )
    for kind, chosen in (("Missed", missed), ("Came back first", first)):
        if chosen:
            yield make("h3", kind)
        for one in chosen:
            yield _show_example(run, index, one)


def _show_example(run: RunFolder, index: Index, outcome: QueryOutcome) -> Element:
    image = find_image(run, index.shards, str(outcome.image_id))
    view = list(VIEWS)[outcome.view]
    caption = f"{view} of {PurePosixPath(image.uri).name}: {outcome.outcome}"
    try:
        rendered = render_view(index.read_pixels(image.uri), view, seed=outcome.image_id)
        answer = index.search(encode_jpeg(rendered, JPEG_QUALITY), HITS_SHOWN)
    except (CknScaleError, OSError):  # its source is out of reach, or the view shows nothing
        original = index.thumbnail(outcome.image_id)
        query = None if original is None else show_pixels(decode_jpeg(original), caption)
        return show_answer(query, f"{caption} (the original is shown: its source is out of reach)", [])
    tiles = [(_show_hit(index, hit), _describe_hit(hit), hit.image_id == outcome.image_id) for hit in answer]
    return show_answer(show_pixels(rendered, caption), caption, tiles, words=("itself", "another"))


def _show_hit(index: Index, hit: Hit) -> Element | None:
    thumbnail = index.thumbnail(hit.image_id)
    return None if thumbnail is None else show_pixels(decode_jpeg(thumbnail), hit.uri)


def _describe_hit(hit: Hit) -> str:
    inliers = "" if hit.inliers is None else f", {hit.inliers} inliers"
    return f"{PurePosixPath(hit.uri).name}: {hit.score:.3f}{inliers}"
