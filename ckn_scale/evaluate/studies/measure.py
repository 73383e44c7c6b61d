"""A study from beginning to end: its variants one by one, each kept when it is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckn_scale.config import Settings
from ckn_scale.errors import InputError, SettingsError
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key
from ckn_scale.evaluate.cut_patches import make_source, measure_cut_patches
from ckn_scale.evaluate.descriptors import Request, parse_requests
from ckn_scale.evaluate.image_sets import read_image_set
from ckn_scale.evaluate.image_table import ImageTable, Place
from ckn_scale.evaluate.patch_sets import read_views
from ckn_scale.evaluate.patch_table import PatchTable, choose_best
from ckn_scale.evaluate.report import write_json
from ckn_scale.evaluate.scenes import read_scenes
from ckn_scale.evaluate.studies.declared import Study, Variant
from ckn_scale.evaluate.studies.rendered import choose_photos, render_pairs
from ckn_scale.evaluate.training_images import Progress, find_images
from ckn_scale.storage.input_files import read_input

Load = Callable[..., Settings]  # overrides as `--set` takes them; a preset by its name
Row = dict[str, Any]
OnRow = Callable[[int, int, Row, bool], None]  # how many are done, of how many, the last, whether it was kept


@dataclass(frozen=True)
class Bench:
    """What every variant of a study is measured with."""

    protocol: str
    data: Path
    train_images: Path
    load: Load
    cache: ContentCache
    on_progress: Progress
    seeds: Sequence[int] = (0, 1, 2)
    workers: int = 1
    num_photos: int = 8  # of rendered pairs
    weights: Sequence[str] = ()  # files of networks, as --weights takes them

    def check(self) -> None:
        """InputError when the data are not what the protocol says, before hours of work."""
        find_images(self.train_images)
        if self.protocol == "photos":
            find_images(self.data)
        elif self.protocol == "mikolajczyk":
            read_scenes(self.data)
        elif self.protocol == "rome":
            read_views(self.data)
        else:
            read_image_set(self.data, self.protocol)

    def describe_sizes(self, settings: Settings) -> str:
        """How much there was to measure on and to learn from: what a figure is read with."""
        training, points = settings.training, settings.keypoints.max_keypoints
        photos = min(settings.sample.num_images, len(find_images(self.train_images)))
        learned = f"{training.num_patches:,} training patches of {photos:,} photographs"
        return f"{self._count_data()}; where not varied: {points:,} points an image, {learned}"

    def _count_data(self) -> str:
        if self.protocol == "photos":
            return f"{len(choose_photos(find_images(self.data), self.num_photos))} photographs"
        if self.protocol == "mikolajczyk":
            scenes = read_scenes(self.data)
            return f"{len(scenes)} scenes, {sum(len(one.homographies) for one in scenes)} pairs"
        if self.protocol == "rome":
            views = read_views(self.data)
            return f"{views.is_query.sum():,} points, {len(views.is_query):,} views"
        images = read_image_set(self.data, self.protocol)
        seeds = f"{len(self.seeds)} codebook{'s' if len(self.seeds) > 1 else ''}"
        return f"{len(images.database):,} images, {len(images.queries):,} queries, {seeds}"

    def measure(self, variant: Variant, folder: Path) -> tuple[float, float]:
        """The figure of a variant, and its deviation over codebooks."""
        settings, requests = self.resolve(variant)
        if variant.change is not None:
            photos = choose_photos(find_images(self.data), self.num_photos)
            pairs = render_pairs(folder / "rendered", photos, *variant.change, settings.images)
            return self._match(pairs, requests, settings, variant), 0.0
        if self.protocol == "mikolajczyk":
            return self._match(self.data, requests, settings, variant), 0.0
        if self.protocol == "rome":
            return self._find_views(requests, settings), 0.0
        return self._find_images(requests, settings, variant)

    def read_weights(self) -> list[bytes]:
        """What figures depend on besides settings and code."""
        return [read_input(one.rpartition("=")[2]) for one in self.weights]

    def resolve(self, variant: Variant) -> tuple[Settings, list[Request]]:
        """Settings with those of the variant, and its descriptor; SettingsError for what cannot be set."""
        plain = self.load()
        overrides = [one for raw in variant.settings for one in _place_channels(raw, plain)]

        def load(preset: str | None = None) -> Settings:
            return self.load(*overrides) if preset is None else self.load(preset=preset)

        return load(), parse_requests(variant.descriptor, load, self.weights)

    def _match(self, data: Path, requests: list[Request], settings: Settings, variant: Variant) -> float:
        train = find_images(self.train_images)
        table = PatchTable(read_scenes(data), requests, settings, train, self.cache, self.on_progress)
        region = settings.patches.region if variant.region is None else variant.region
        return choose_best(table.measure([region], [None])[requests[0].name]).mean_ap

    def _find_views(self, requests: list[Request], settings: Settings) -> float:
        views = read_views(self.data)
        source = make_source(views, self.train_images, settings, self.cache, self.on_progress)
        cells = measure_cut_patches(views, requests, [None], source, self.cache, self.on_progress)
        return cells[requests[0].name][0].figures["map"]

    def _find_images(
        self, requests: list[Request], settings: Settings, variant: Variant
    ) -> tuple[float, float]:
        images = read_image_set(self.data, self.protocol, crop=variant.crop)
        table = ImageTable(
            images,
            requests,
            settings,
            find_images(self.train_images),
            self.cache,
            self.on_progress,
            seeds=self.seeds,
            intra_choices=[settings.vlad.intra_normalise],
            workers=self.workers,
        )
        region = settings.patches.region if variant.region is None else variant.region
        cell = table.measure([Place(region, None)])[requests[0].name, "none"][0]
        return cell.mean_score, cell.spread


def _place_channels(setting: str, settings: Settings) -> Iterator[str]:
    """`channels.{grad}.…` with the number of that channel; `+pooling=grad`: by one more in each layer."""
    places = {name: str(place) for place, name in enumerate(settings.channel_names)}
    if setting.startswith("+pooling="):
        name = setting.partition("=")[2]
        ckn = settings.channels[int(_find_place(places, name))].ckn
        layers = () if ckn is None else ckn.layers
        yield f"channels.{places[name]}.ckn.position_step=1"
        for number, layer in enumerate(layers if len(layers) > 1 else ()):  # the paper leaves raw's one layer
            yield f"channels.{places[name]}.ckn.layers.{number}.subsampling={layer.subsampling + 1}"
        return
    before, brace, rest = setting.partition("{")
    name, _, after = rest.partition("}")
    yield f"{before}{_find_place(places, name)}{after}" if brace else setting


def _find_place(places: dict[str, str], name: str) -> str:
    if name not in places:
        raise SettingsError(f"the preset has no channel {name!r}; it has: {', '.join(places)}")
    return places[name]


def run_study(
    study: Study, bench: Bench, descriptors: Sequence[str], folder: Path, on_row: OnRow = lambda *_: None
) -> list[Row]:
    """A row for each variant, in order; those that were measured before are taken from the folder."""
    variants = list(study.list_variants(descriptors))
    about = [bench.protocol, list(bench.seeds), bench.num_photos, *bench.read_weights()]
    about += [stamp_folder(bench.data), stamp_folder(bench.train_images)]
    rows: list[Row] = []
    for variant in variants:
        row, kept = _measure_once(bench, variant, folder, about)
        rows.append(row)
        on_row(len(rows), len(variants), row, kept)
    return rows


def stamp_folder(folder: Path) -> list[list[Any]]:
    """Its files by name, size and time of change: other data are measured again."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    stamps = [(path.absolute(), path.stat()) for path in found]
    return [[str(path), status.st_size, status.st_mtime_ns] for path, status in stamps]


def _measure_once(bench: Bench, variant: Variant, folder: Path, about: Sequence[Any]) -> tuple[Row, bool]:
    """What cannot be measured (too small a map, a descriptor without weights) is a row with a reason."""
    row: Row = asdict(variant)
    started = time.monotonic()
    try:
        settings = bench.resolve(variant)[0].model_dump(mode="json")
        kept = folder / "variants" / f"{make_key('study', hash_code(), row, settings, *about)}.json"
        if kept.is_file():
            found: Row = json.loads(kept.read_text())
            return found, True
        figure, spread = bench.measure(variant, folder)
    except (InputError, ValueError) as error:
        return {**row, "figure": None, "reason": str(error).splitlines()[0]}, False
    seconds = round(time.monotonic() - started, 1)
    row |= {"figure": float(np.float64(figure)), "spread": spread, "seconds": seconds}
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(kept, row)
    return row, False
