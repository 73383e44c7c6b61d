"""The page in a real browser, against the real server."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from running_server import KEY, query_view

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SCREENSHOTS = "CKN_SCALE_SCREENSHOTS"  # a folder: what the page looks like is kept there

DROP = """async ([target, bytes, name, type]) => {
  const carried = new DataTransfer();
  carried.items.add(new File([new Uint8Array(bytes)], name, {type}));
  document.querySelector(target).dispatchEvent(new DragEvent("drop", {dataTransfer: carried, bubbles: true}));
}"""


def find_chromium() -> str:
    """Debian's browser, installed by us where we may; else the test is skipped."""
    if not Path(CHROMIUM).exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, timeout=120)
        subprocess.run(["apt-get", "install", "-qy", "chromium"], capture_output=True, timeout=280)
    if not Path(CHROMIUM).exists():
        pytest.skip("no browser: apt-get install chromium")
    return CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=FLAGS)
        yield browser
        browser.close()
    with warnings.catch_warnings():
        # Playwright leaves its driver's pipe to the garbage collector; here, and not in someone's test.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def page(browser, server, request) -> Iterator[Page]:
    """A fresh visit; the test fails when the page logs an error or asks anyone but the server."""
    context = browser.new_context(viewport=getattr(request, "param", DESKTOP))
    page = context.new_page()
    strangers, complaints = [], []
    page.on(
        "request",
        lambda sent: sent.url.startswith((server.url, "blob:", "data:")) or strangers.append(sent.url),
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: "Content Security" in line.text and complaints.append(line.text))
    page.goto(server.url)
    yield page
    context.close()
    assert (strangers, complaints) == ([], [])


def drop(page: Page, data: bytes, name: str = "query.jpg", kind: str = "image/jpeg") -> None:
    page.evaluate(DROP, ["#drop", list(data), name, kind])


def enter_key(page: Page, key: str = KEY) -> None:
    page.get_by_label("This server needs a key").fill(key)
    page.get_by_role("button", name="Use key").click()


def keep_screenshot(page: Page, name: str) -> None:
    folder = os.environ.get(SCREENSHOTS)
    if folder:
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def assert_fits(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


@pytest.mark.parametrize("page", [DESKTOP, PHONE], ids=["desktop", "phone"], indirect=True)
def test_a_dropped_image_shows_its_hits_with_thumbnails(page, request):
    name = request.node.callspec.id
    assert_fits(page)
    keep_screenshot(page, f"{name}-empty")
    drop(page, query_view("coffee"))
    keep_screenshot(page, f"{name}-key")
    enter_key(page)
    first = page.locator(".hit").first
    expect(first.locator(".uri")).to_contain_text("coffee.jpg", timeout=20_000)
    expect(page.locator(".hit")).to_have_count(12)
    expect(page.locator(".thumb img:not([hidden])")).to_have_count(12)
    assert page.locator(".thumb img").first.evaluate("image => image.naturalWidth") > 0
    assert 0.1 < float(first.locator(".score").inner_text()) <= 1
    expect(page.locator("#status")).to_contain_text("12 hits in")
    assert_fits(page)
    expect(page.locator("#server")).to_contain_text("16 images · index version")
    keep_screenshot(page, f"{name}-hits")
    page.emulate_media(color_scheme="dark")
    keep_screenshot(page, f"{name}-dark")


def test_a_frame_searches_for_the_part_and_the_whole_comes_back(page):
    drop(page, query_view("astronaut"))
    enter_key(page)
    expect(page.locator(".hit")).to_have_count(12, timeout=20_000)
    area = page.locator("#image").bounding_box()
    with page.expect_request("**/v1/search") as framed:
        page.mouse.move(area["x"] + 20, area["y"] + 20)
        page.mouse.down()
        page.mouse.move(area["x"] + area["width"] * 0.8, area["y"] + area["height"] * 0.8, steps=4)
        page.mouse.up()
    x1, y1, x2, y2 = framed.value.post_data_json["box"]
    natural = page.locator("#image").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert 0 < x1 < x2 <= natural[0]
    assert 0 < y1 < y2 <= natural[1]
    assert x2 == pytest.approx(0.8 * natural[0], abs=3)
    expect(page.locator("body")).not_to_have_class("busy")
    keep_screenshot(page, "desktop-frame")
    with page.expect_request("**/v1/search") as whole:
        page.get_by_role("button", name="Whole image").click()
    assert whole.value.post_data_json["box"] is None


def test_the_number_of_hits_can_be_chosen(page):
    drop(page, query_view("rocket"))
    enter_key(page)
    expect(page.locator(".hit")).to_have_count(12, timeout=20_000)
    page.get_by_role("combobox").select_option("5")
    expect(page.locator(".hit")).to_have_count(5)


@pytest.mark.parametrize("page", [DESKTOP, PHONE], ids=["desktop", "phone"], indirect=True)
def test_what_goes_wrong_is_told_in_words(page, request):
    drop(page, b"no image at all", "notes.txt", "text/plain")
    enter_key(page, "a wrong key")
    error = page.get_by_role("alert")
    expect(error).to_contain_text("does not know this key", timeout=10_000)
    enter_key(page)
    expect(error).to_contain_text("The image cannot be used (unsupported)", timeout=10_000)
    expect(page.locator("#caption")).to_have_text("notes.txt: no preview")
    keep_screenshot(page, f"{request.node.callspec.id}-error")
    assert_fits(page)
    page.evaluate("chooseFile(new File([new Uint8Array(13 * 2 ** 20)], 'large.jpg'))")
    expect(error).to_contain_text("13.0 MiB; the server takes images up to 12 MiB")
    page.route("**/v1/search", lambda route: route.abort())
    drop(page, query_view("coffee"))
    expect(error).to_contain_text("cannot be reached")


def test_a_partial_answer_is_marked(page):
    hit = {"image_id": 0, "uri": "s3://bucket/far/a/b.jpg", "score": 0.5, "columns": {"place": "Rome"}}
    body = {"version": 3, "hits": [hit], "coverage": 0.5, "partial": True, "timings_ms": {"total": 5.0}}
    page.route("**/v1/search", lambda route: route.fulfill(json=body))
    drop(page, query_view("coffee"))
    expect(page.locator("#partial")).to_have_text(
        "Part of the index did not answer: 50 % of the images were searched."
    )
    expect(page.locator(".uri")).to_have_text("…/a/b.jpg")
    expect(page.locator(".columns")).to_have_text("placeRome")
    keep_screenshot(page, "desktop-partial")
