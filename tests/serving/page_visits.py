"""A collection for the page to show, its server and browser, and what a visitor does."""

from __future__ import annotations

import base64
import contextlib
import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import install_axe, open_browser
from playwright.sync_api import Browser, Locator, Page, Route, expect
from running_server import KEY, AnsweringServer, local_server_of

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.augmentations import render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo
from ckn_scale.pipeline import index_images

DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SCREENSHOTS = "CKN_SCALE_SCREENSHOTS"  # a folder: what the page looks like is kept there
MARKUP = "<img src=x onerror=document.title='broken'>"
DROP = """async ([bytes, name, type]) => {
  const carried = new DataTransfer();
  const decoded = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  carried.items.add(new File([decoded], name, {type}));
  document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: carried, bubbles: true}));
}"""

PASTE = """bytes => {
  const carried = new DataTransfer();
  const decoded = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
  carried.items.add(new File([decoded], "image.png", {type: "image/png"}));
  document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData: carried, bubbles: true}));
}"""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, a copy, a portrait and a name full of markup among them, with a list."""
    folder = tmp_path_factory.mktemp("collection")
    images = {name: (read_photo(name), 92) for name in (*PHOTOS[:6], *DISTRACTORS[:4])}
    images["coffee-again"] = (images["coffee"][0], 60)
    images[MARKUP] = (np.ascontiguousarray(read_photo("rocket")[:, :300]), 92)
    with (folder / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["uri", "title", "year"])
        for name, (pixels, quality) in images.items():
            (folder / f"{name}.jpg").write_bytes(encode_jpeg(pixels, quality))
            table.writerow([folder / f"{name}.jpg", f"<b>{name}</b>", 1999])
    return folder


@pytest.fixture(scope="module")
def collection(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("page") / "run"
    settings = load_settings("tiny", None, ["encode.thumbnail_side_px=160"])
    index_images(
        str(photographs / "list.csv"),
        str(run),
        settings,
        Resources(workers=0),
        keep=["title", "year"],
        accept=True,
    )
    return run


@pytest.fixture(scope="module")
def page_server(photographs: Path, collection: Path) -> Iterator[AnsweringServer]:
    """With originals, and pictures by their address."""
    with local_server_of(collection, uri_prefixes=(str(photographs),)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install_axe(tmp_path_factory.mktemp("axe"))


@pytest.fixture
def visit(browser: Browser, page_server: AnsweringServer) -> Iterator[Callable[..., Page]]:
    """Opens the page; the test fails when it logs an error or asks anyone but the server."""
    contexts, strangers, complaints = [], [], []

    def open_page(path: str = "/", key: str | None = KEY, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        allowed = (page_server.url, "blob:", "data:")
        page.on("request", lambda sent: sent.url.startswith(allowed) or strangers.append(sent.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: "Content Security" in line.text and complaints.append(line.text))
        if key:
            page.add_init_script(f"sessionStorage.getItem('key') ?? sessionStorage.setItem('key', '{key}')")
        page.goto(page_server.url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert (strangers, complaints) == ([], [])


def drop(page: Page, data: bytes, name: str = "query.jpg", kind: str = "image/jpeg") -> None:
    page.evaluate(DROP, [base64.b64encode(data).decode(), name, kind])


def paste(page: Page, data: bytes) -> None:
    page.evaluate(PASTE, base64.b64encode(data).decode())


def search(page: Page, photo: str, title: str, view: str = "crop") -> None:
    """Drop a view of a photograph that is not in the index, and wait for the answer."""
    drop(page, encode_jpeg(render_view(read_photo(photo), view, 100), 88), f"{photo}.jpg")
    expect(page.get_by_role("heading", name=title)).to_be_visible()
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")


def keep_screenshot(page: Page, name: str, *, full: bool = True) -> None:
    folder = os.environ.get(SCREENSHOTS)
    for scheme in ("dark", "light") if folder else ():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(500)
        page.screenshot(path=f"{folder}/{name}-{scheme}.png", full_page=full)


def assert_fits(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def card(page: Page, name: str) -> Locator:
    return page.locator(".hit", has=page.locator(".name", has_text=name))


def tap(target: Locator, opened: Locator) -> None:
    """A finger's tap that opens something; right after a scroll Chromium may not take it for one."""
    target.scroll_into_view_if_needed()
    for _ in range(5):
        target.tap()
        with contextlib.suppress(AssertionError):
            expect(opened).to_be_visible(timeout=3000)
            return
    raise AssertionError("five taps opened nothing")


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> list[float]:
    """With the mouse, in shares of the query's image; what is searched for, in its pixels."""
    area = page.locator("#image").bounding_box()
    assert area is not None
    with page.expect_request("**/v1/search") as sent:
        page.mouse.move(area["x"] + start[0] * area["width"], area["y"] + start[1] * area["height"])
        page.mouse.down()
        page.mouse.move(area["x"] + end[0] * area["width"], area["y"] + end[1] * area["height"], steps=4)
        page.mouse.up()
    box: list[float] = sent.value.post_data_json["box"]
    return box


def refuse(page: Page, status: int, times: int, **headers: str) -> list[int]:
    """The server's next answers to searches; how many were given is in the list."""
    given: list[int] = []

    def answer(route: Route) -> None:
        if len(given) == times:
            route.fallback()
            return
        given.append(status)
        error = {"code": "none", "message": "words for a developer"}
        route.fulfill(status=status, json={"error": error}, headers=headers)

    page.route("**/v1/search", answer)
    return given
