"""The whole path on a small photo set: index it, serve it, query it over HTTP, show the answers.

The photographs ship inside scikit-image. Of each one the index holds the original
and four rendered views, beside distractors; the queries are other views, which it has never seen.
"""

from __future__ import annotations

import base64
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from ckn_scale.core.augmentations import render_view
from ckn_scale.core.images import decode_image, decode_jpeg, encode_jpeg
from ckn_scale.core.specs import ImageSpec
from ckn_scale.errors import InputError, MissingDependency

if TYPE_CHECKING:
    from ckn_scale.runners.driver import ProgressHook

PHOTOS = (
    "astronaut",
    "camera",
    "chelsea",
    "coffee",
    "coins",
    "hubble_deep_field",
    "motorcycle_left",
    "rocket",
    "ihc",
    "retina",
)
DISTRACTORS = ("brick", "cell", "clock_motion", "grass", "gravel", "horse", "logo", "moon", "page", "text")
INDEXED_VIEWS = ("tilt", "blur", "relight", "compress")
QUERY_VIEWS = ("crop", "turn")
HITS = 5
OWN_FILES = {"photos", "run", "contact_sheet.png"}
SIDE_PX, GAP_PX, CAPTION_PX = 160, 8, 22


@dataclass(frozen=True)
class Query:
    photo: str
    view: str
    jpeg: bytes


@dataclass(frozen=True)
class Answer:
    query: Query
    hits: list[dict[str, Any]]

    @property
    def right(self) -> list[bool]:
        return [photo_of(hit["uri"]) == self.query.photo for hit in self.hits]


def run_demo(
    folder: Path, *, port: int, once: bool, say: Callable[[str], None], on_progress: ProgressHook
) -> bool:
    """Everything, in `folder`; True when each query found its own photograph first.

    `say` gets the lines a user reads, `on_progress` what the steps report. With `once` it returns after
    the queries, else it serves until a signal.
    """
    from ckn_scale.config import Resources, load_settings
    from ckn_scale.pipeline import index_images
    from ckn_scale.serving.app import Serving, check_port, serve_run

    check_port("127.0.0.1", port)
    _clear(folder)
    count = write_photo_set(folder / "photos")
    say(f"{count} images in {folder / 'photos'}: photographs, views of them, distractors")
    began = time.monotonic()
    settings = load_settings(overrides=["sample.num_patches=16000"])
    run_url = str(folder / "run")
    report = index_images(
        str(folder / "photos"), run_url, settings, Resources(workers=2), on_progress=on_progress
    )
    say(f"indexed {report.states} in {time.monotonic() - began:.0f} s: version {report.version} of {run_url}")
    outcome: list[bool] = []

    def ask(serving: Serving) -> None:
        say(f"serving it at {serving.url}")
        answers = [ask_server(serving.url, query) for query in make_queries()]
        outcome.append(report_answers(answers, folder / "contact_sheet.png", say))
        if not once:
            say(f"open {serving.url} in a browser and drop an image on the page (Ctrl-C ends the demo)")

    serve_run(run_url, port=port, shard_groups=2, on_ready=ask, block=not once)
    return bool(outcome) and outcome[0]


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left; anything else is the user's, and refused."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name another folder with --folder")
    others = {one.name for one in folder.iterdir()} - OWN_FILES if folder.exists() else set()
    if others:
        raise InputError(
            f"{folder} holds {sorted(others)[0]}, which is not of a demo: name another folder with --folder"
        )
    if folder.exists():
        shutil.rmtree(folder)


def write_photo_set(folder: Path) -> int:
    folder.mkdir(parents=True)
    for name in PHOTOS:
        photo = read_photo(name)
        (folder / f"{name}.jpg").write_bytes(encode_jpeg(photo, 92))
        for seed, view in enumerate(INDEXED_VIEWS):
            (folder / f"{name}-{view}.jpg").write_bytes(encode_jpeg(render_view(photo, view, seed), 90))
    for name in DISTRACTORS:
        for part, pixels in enumerate(_halves(read_photo(name))):
            (folder / f"other-{name}-{part}.jpg").write_bytes(encode_jpeg(pixels, 90))
    return len(list(folder.iterdir()))


def make_queries() -> Iterator[Query]:
    for name in PHOTOS:
        for seed, view in enumerate(QUERY_VIEWS, start=100):
            yield Query(name, view, encode_jpeg(render_view(read_photo(name), view, seed), 85))


def ask_server(url: str, query: Query) -> Answer:
    body = json.dumps({"image": base64.b64encode(query.jpeg).decode(), "k": HITS}).encode()
    request = urllib.request.Request(f"{url}/v1/search", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return Answer(query, json.load(response)["hits"])


def report_answers(answers: Sequence[Answer], sheet: Path, say: Callable[[str], None]) -> bool:
    """Print the hits, write the contact sheet; True when every first hit is right."""
    for answer in answers:
        names = "  ".join(
            f"{Path(hit['uri']).stem} {hit['score']:.2f}{'' if right else ' ✗'}"
            for hit, right in zip(answer.hits, answer.right, strict=True)
        )
        say(f"  {answer.query.photo} ({answer.query.view}): {names}")
    firsts = sum(answer.right[0] for answer in answers)
    found = sum(sum(answer.right) for answer in answers)
    say(
        f"{firsts} of {len(answers)} queries found their photograph first; {found} of "
        f"{HITS * len(answers)} hits show it"
    )
    cv2.imwrite(str(sheet), draw_sheet(answers)[:, :, ::-1])
    say(f"contact sheet: {sheet}")
    return firsts == len(answers)


def draw_sheet(answers: Sequence[Answer]) -> np.ndarray:
    """A row per query: the query, then its hits, framed green where they show the same photograph."""
    return np.concatenate([_draw_row(answer) for answer in answers])


def photo_of(uri: str) -> str:
    return Path(uri).stem.split("-")[0]


def read_photo(name: str) -> np.ndarray:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise MissingDependency("the demo's photographs are missing: pip install 'ckn-scale[demo]'")
    path = next(iter(sorted((Path(spec.origin).parent / "data").glob(f"{name}.*"))))
    return decode_image(path.read_bytes(), ImageSpec())


def _halves(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    middle = image.shape[1] // 2
    return np.ascontiguousarray(image[:, :middle]), np.ascontiguousarray(image[:, middle:])


def _draw_row(answer: Answer) -> np.ndarray:
    query = decode_jpeg(answer.query.jpeg)
    cells = [_draw_cell(query, f"query: {answer.query.view}", (60, 90, 200))]
    for hit, right in zip(answer.hits, answer.right, strict=True):
        pixels = decode_jpeg(Path(hit["uri"]).read_bytes())
        colour = (40, 160, 70) if right else (200, 60, 50)
        cells.append(_draw_cell(pixels, f"{hit['score']:.2f} {Path(hit['uri']).stem}"[:24], colour))
    return np.concatenate(cells, axis=1)


def _draw_cell(image: np.ndarray, caption: str, colour: tuple[int, int, int]) -> np.ndarray:
    cell = np.full((SIDE_PX + 2 * GAP_PX + CAPTION_PX, SIDE_PX + 2 * GAP_PX, 3), 255, np.uint8)
    factor = SIDE_PX / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor)))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    top, left = GAP_PX + (SIDE_PX - size[1]) // 2, GAP_PX + (SIDE_PX - size[0]) // 2
    cell[top : top + size[1], left : left + size[0]] = small
    cv2.rectangle(cell, (left - 3, top - 3), (left + size[0] + 2, top + size[1] + 2), colour, 2)
    place = (GAP_PX, SIDE_PX + 2 * GAP_PX + 10)
    cv2.putText(cell, caption, place, cv2.FONT_HERSHEY_SIMPLEX, 0.36, (40, 40, 40), 1, cv2.LINE_AA)
    return cell
