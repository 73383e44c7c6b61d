"""The page in a real browser, against the real server."""

from __future__ import annotations

import io
import re

import numpy as np
import pillow_heif
import pytest
from browser import find_barriers, swipe
from page_visits import (
    DESKTOP,
    MARKUP,
    PHONE,
    assert_fits,
    card,
    drag,
    drop,
    keep_screenshot,
    paste,
    refuse,
    search,
    tap,
)
from PIL import Image
from playwright.sync_api import Route, expect
from running_server import KEY, query_view

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo

ABSENT = "horse"
# How far the two places of each match lie apart on the stage.
DISTANCES = """({matches, sizes}) => {
  const [theirs, ours] = [".theirs", ".ours"].map((name) => document.querySelector(`#stage ${name}`));
  const place = (image, x, y, [width, height]) => {
    const at = new DOMPoint((x / width) * image.offsetWidth, (y / height) * image.offsetHeight);
    const {x: u, y: v, w} = new DOMMatrix(getComputedStyle(image).transform).transformPoint(at);
    return [u / w, v / w];
  };
  return matches.map(([x, y, u, v]) => {
    const [from, to] = [place(theirs, x, y, sizes[0]), place(ours, u, v, sizes[1])];
    return Math.hypot(from[0] - to[0], from[1] - to[1]);
  });
}"""
INKED = """canvas => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, i) => i % 4 === 3 && value > 0).length;
}"""
expect.set_options(timeout=20_000)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_empty_page_shows_the_collection_and_its_certificate(visit, page_server, axe, viewport):
    page = visit(viewport=viewport)
    examples = page.get_by_role("button", name="Search with")
    expect(examples).to_have_count(12)
    expect(page.locator("#server")).to_have_text("12 pictures · version 1")
    certificate = page_server.client.get("/v1/index").json()["certificate"]
    tested = f"asked for {certificate['queries']} of its own pictures"
    expect(page.locator("#about")).to_contain_text(tested)
    expect(page.locator("#about")).to_contain_text(f"For {certificate['first']} the original came first")
    expect(page.get_by_label("Address of a picture")).to_be_visible()
    expect(page.locator(".example img").last).to_have_js_property("complete", True)
    assert find_barriers(page, axe) == []
    assert_fits(page)
    keep_screenshot(page, f"{viewport['width']}-empty")


def test_found_pictures_come_first_with_their_evidence(visit, axe):
    page = visit()
    with page.expect_response("**/v1/search") as answered:
        search(page, "coffee", "Found")
    answer = answered.value.json()
    best = max(hit["inliers"] for hit in answer["hits"])
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("2 pictures show the same thing")
    expect(verdict).to_contain_text(f"in {best} places; {answer['decision']['min_inliers']} are enough")
    expect(verdict).to_contain_text("1 in 1,000,000 pairs")
    expect(page.locator("#status")).to_contain_text("Found. 2 pictures show the same thing.")
    matches, weak = page.locator(".matches .hit"), page.locator(".weak .hit")
    expect(matches).to_have_count(1)
    expect(matches).to_contain_text("+ 1 copy")
    expect(page.get_by_role("heading", name="Weak neighbours")).to_be_visible()
    assert weak.count() + 2 == 12
    expect(page.locator(".hit img").last).to_have_js_property("complete", True)
    assert find_barriers(page, axe) == []
    keep_screenshot(page, "found")


def test_nothing_found_says_so_before_what_looks_alike(visit, axe):
    page = visit()
    search(page, ABSENT, "Nothing found")
    expect(page.locator(".verdict")).to_contain_text("No picture in this collection shows the same thing.")
    expect(page.locator(".verdict")).to_contain_text("a match needs")
    expect(page.locator(".matches")).to_have_count(0)
    expect(page.locator(".weak .hit").first).to_be_visible()
    assert find_barriers(page, axe) == []
    keep_screenshot(page, "nothing")


def test_a_hit_opens_with_its_matches_and_registered_on_the_query(visit, axe):
    page = visit()
    search(page, "astronaut", "Found", view="tilt")
    first = page.locator(".hit").first
    first.focus()
    with page.expect_response("**/v1/match") as matched:
        page.keyboard.press("Enter")
    match = matched.value.json()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("#hit-verdict")).to_contain_text(f"The same thing: {match['inliers']} places agree")
    expect(dialog.locator("#facts")).to_contain_text("<b>astronaut</b>")
    assert page.evaluate("document.querySelector('#hit').contains(document.activeElement)")
    assert page.locator("#stage .ours").evaluate("image => image.naturalWidth") == 512  # the original
    expect(page.get_by_role("link", name="Open the original")).to_have_attribute("href", re.compile("^blob:"))
    assert page.locator("#stage canvas").evaluate(INKED) > 20 * len(match["matches"])
    assert find_barriers(page, axe) == []
    keep_screenshot(page, "hit", full=False)

    beside = page.evaluate(DISTANCES, match)
    page.get_by_label("On each other").check()
    registered = page.evaluate(DISTANCES, match)
    assert len(registered) >= match["decision"]["min_inliers"]
    assert np.median(beside) > 100
    assert np.median(registered) < 8
    fade = page.get_by_label("Fade from your picture to theirs")
    fade.press("End")
    expect(page.locator("#stage .theirs")).to_have_css("opacity", "0")
    page.get_by_role("button", name="Show yours").click()
    expect(page.locator("#stage .theirs")).to_have_css("opacity", "1")
    fade.fill("50")
    assert find_barriers(page, axe) == []
    keep_screenshot(page, "registered", full=False)

    dialog.get_by_role("button", name="Copy", exact=True).click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").endswith("/astronaut.jpg")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(first).to_be_focused()


def test_hits_are_walked_through_and_searched_with(visit):
    page = visit()
    search(page, "coffee", "Found")
    page.locator(".hit").first.click()
    verdict = page.locator("#hit-verdict")
    expect(verdict).to_contain_text("The same thing")
    page.get_by_role("button", name="Show copy").click()
    expect(page.locator("#uri")).to_contain_text("coffee")
    page.get_by_role("button", name="Next hit").click()
    expect(verdict).to_contain_text("Not enough evidence")
    page.keyboard.press("ArrowLeft")
    expect(verdict).to_contain_text("The same thing")
    page.get_by_role("button", name="Search with this").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator(".verdict")).to_contain_text("1 other picture shows the same thing.")
    earlier = page.locator("#visit").get_by_role("button")
    expect(earlier).to_have_count(2)
    page.go_back()
    expect(page.locator("#hit-verdict")).to_contain_text("The same thing")
    page.keyboard.press("Escape")
    earlier.first.click()
    expect(page.locator(".verdict")).to_contain_text("1 other picture")


def test_the_address_of_an_indexed_image_can_be_reloaded_and_sent(visit):
    page = visit()
    page.get_by_role("button", name="Search with coffee.jpg").click()
    expect(page.locator(".verdict")).to_contain_text("1 other picture shows the same thing.")
    page.locator(".hit").first.click()
    expect(page.locator("#hit-verdict")).to_contain_text("The same thing")
    address = page.url
    assert "image=" in address
    assert "hit=" in address
    page.reload()
    expect(page.locator("#hit-verdict")).to_contain_text("The same thing")
    expect(page.locator("#uri")).to_contain_text("coffee-again.jpg")
    page.get_by_role("button", name="Close").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page).not_to_have_url(re.compile("hit="))
    sent = visit(address[len(page.evaluate("location.origin")) :].replace("hit=", "box=0.1,0.1,0.9,0.9&hit="))
    expect(sent.locator("#hit-verdict")).to_contain_text("The same thing")
    expect(sent.locator(".frame")).to_be_attached()
    unknown = visit("/?image=999999")
    expect(unknown.get_by_role("alert")).to_contain_text("not in the collection")


def test_a_frame_is_drawn_moved_and_resized_with_mouse_and_keyboard(visit, axe):
    page = visit()
    search(page, "astronaut", "Found")
    width, height = page.locator("#image").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    scale = np.array([width, height, width, height])
    near = {"abs": 0.02 * max(width, height)}
    assert drag(page, (0.2, 0.3), (0.7, 0.8)) == pytest.approx(scale * [0.2, 0.3, 0.7, 0.8], **near)
    assert drag(page, (0.5, 0.5), (0.6, 0.4)) == pytest.approx(scale * [0.3, 0.2, 0.8, 0.7], **near)
    assert drag(page, (0.8, 0.7), (0.9, 0.9)) == pytest.approx(scale * [0.3, 0.2, 0.9, 0.9], **near)
    assert drag(page, (0.3, 0.5), (0.1, 0.5)) == pytest.approx(scale * [0.1, 0.2, 0.9, 0.9], **near)
    frame = page.locator(".frame")
    with page.expect_request("**/v1/search") as moved:
        frame.press("ArrowLeft")
        frame.press("Shift+ArrowUp")
        page.get_by_label("upper left corner").press("ArrowDown")
    assert moved.value.post_data_json["box"] == pytest.approx(scale * [0.08, 0.22, 0.88, 0.88], **near)
    assert "from 8 to 88 % across" in (frame.get_attribute("aria-label") or "")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    assert find_barriers(page, axe) == []
    keep_screenshot(page, "frame")
    with page.expect_request("**/v1/search") as whole:
        page.keyboard.press("Escape")
    assert "box" not in whole.value.post_data_json
    expect(frame).to_be_hidden()
    with page.expect_request("**/v1/search") as added:
        page.get_by_role("button", name="Frame a part").press("Enter")
    assert added.value.post_data_json["box"] == pytest.approx(scale * [0.2, 0.2, 0.8, 0.8], **near)
    expect(frame).to_be_focused()


def test_a_phone_frames_with_a_finger_and_shows_everything(visit, axe):
    page = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    search(page, "chelsea", "Found")
    assert_fits(page)
    keep_screenshot(page, "phone-found")
    with page.expect_response("**/v1/search"):
        page.get_by_role("button", name="Frame a part").tap()
    sides = page.locator("#image").evaluate("image => [image.naturalWidth, image.naturalHeight]")

    def slide(start: tuple[float, float], end: tuple[float, float]) -> list[float]:
        """A finger's way, and the frame that is searched for then, both in shares of the image."""
        area = page.locator("#image").bounding_box()
        corner, size = (area["x"], area["y"]), (area["width"], area["height"])
        places = [
            tuple(c + share * side for c, share, side in zip(corner, at, size, strict=True))
            for at in (start, end)
        ]
        with page.expect_response("**/v1/search") as framed:
            swipe(page, *places)
        box = framed.value.request.post_data_json["box"]
        return [side / sides[i % 2] for i, side in enumerate(box)]

    # From 0.2 to 0.8: its lower right corner beyond the image, its upper left, its left side, all of it
    assert slide((0.8, 0.8), (1.1, 0.9)) == pytest.approx([0.2, 0.2, 1.0, 0.9], abs=0.01)
    assert slide((0.2, 0.2), (0.3, 0.4)) == pytest.approx([0.3, 0.4, 1.0, 0.9], abs=0.01)
    assert slide((0.3, 0.65), (0.5, 0.65)) == pytest.approx([0.5, 0.4, 1.0, 0.9], abs=0.01)
    assert slide((0.75, 0.6), (0.55, 0.5)) == pytest.approx([0.3, 0.3, 0.8, 0.8], abs=0.01)
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    keep_screenshot(page, "phone-frame")
    with page.expect_response("**/v1/match") as matched:
        tap(page.locator(".hit").first, page.get_by_role("dialog"))
    expect(page.locator("#hit-verdict")).to_contain_text("agree")
    assert find_barriers(page, axe) == []
    assert_fits(page)
    keep_screenshot(page, "phone-hit", full=False)
    page.get_by_label("On each other").tap()
    match = matched.value.json()
    assert match["sizes"][0] == pytest.approx([side / 2 for side in sides], abs=3), "what the frame cuts out"
    assert np.median(page.evaluate(DISTANCES, {**match, "sizes": [sides, match["sizes"][1]]})) < 8
    keep_screenshot(page, "phone-registered", full=False)
    page.go_back()
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_portraits_use_their_card_and_names_stay_text(visit):
    page = visit()
    search(page, ABSENT, "Nothing found")
    portrait = card(page, MARKUP)
    expect(portrait).to_be_visible()
    expect(portrait).to_contain_text(f"<b>{MARKUP}</b>")
    image, thumb = portrait.locator("img"), portrait.locator(".thumb")
    assert image.evaluate("image => image.naturalHeight > image.naturalWidth")
    shape = image.evaluate("image => image.naturalWidth / image.naturalHeight")
    assert thumb.evaluate("thumb => thumb.clientWidth / thumb.clientHeight") == pytest.approx(shape, rel=0.05)
    portrait.click()
    expect(page.locator("#uri")).to_contain_text(MARKUP)
    expect(page.locator("#facts")).to_contain_text(f"<b>{MARKUP}</b>")
    assert page.locator("b, [onerror]").count() == 0
    assert page.title() != "broken"


def test_what_a_browser_cannot_show_is_previewed_by_the_server(visit):
    page = visit()
    pixels = Image.open(io.BytesIO(query_view("coffee")))
    heic = io.BytesIO()
    pillow_heif.from_pillow(pixels).save(heic, quality=90)
    drop(page, heic.getvalue(), "photo.heic", "image/heic")
    expect(page.get_by_role("heading", name="Found")).to_be_visible()
    assert page.locator("#image").evaluate("image => image.naturalWidth") > 100
    box = drag(page, (0.25, 0.25), (0.75, 0.75))
    width, height = pixels.size
    assert box == pytest.approx(np.array([width, height, width, height]) * [0.25, 0.25, 0.75, 0.75], abs=8)


def test_a_picture_is_fetched_by_its_address_where_the_server_allows(visit, photographs):
    page = visit()
    field = page.get_by_label("Address of a picture")
    field.fill("/elsewhere/coffee.jpg")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(f"Pictures are fetched only from {photographs}")
    field.fill(f"{photographs}/coffee.jpg")
    field.press("Enter")
    expect(page.locator(".verdict")).to_contain_text("2 pictures show the same thing")
    field.fill(f"{photographs}/missing.jpg")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("There is no picture at this address.")


def test_a_key_is_asked_for_where_the_server_needs_one(visit):
    page = visit(key=None)
    field = page.get_by_label("This collection is protected")
    expect(field).to_be_focused()
    keep_screenshot(page, "key")
    field.fill("a wrong key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This key is not known here.")
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Search with")).to_have_count(12)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(field).to_be_hidden()
    page.get_by_role("button", name="Forget key").click()
    expect(field).to_be_visible()


def test_what_goes_wrong_is_told_to_a_visitor(visit, axe):
    page = visit()
    alert = page.get_by_role("alert")
    drop(page, b"no image at all", "notes.txt", "text/plain")
    expect(alert).to_contain_text("not a picture that can be read here")
    drop(page, query_view("coffee")[:900])
    expect(alert).to_contain_text("This picture file is incomplete")
    drop(page, b"", "nothing.jpg")
    expect(alert).to_contain_text("This file is empty.")
    expect(page.get_by_role("button", name="Try again")).to_be_hidden()
    assert find_barriers(page, axe) == []

    given = refuse(page, 429, 2, **{"retry-after": "1"})
    paste(page, query_view("coffee"))
    expect(page.locator("#progress")).to_contain_text(
        "Many people are searching at the moment: trying again in 1 s"
    )
    expect(page.get_by_role("heading", name="Found")).to_be_visible()
    assert given == [429, 429]

    refuse(page, 503, 3, **{"retry-after": "30"})
    drop(page, query_view("chelsea"))
    expect(alert).to_contain_text("cannot be searched just now")
    expect(alert).not_to_contain_text("developer")
    keep_screenshot(page, "unavailable")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Found")).to_be_visible()
    expect(alert).to_be_hidden()

    page.route("**/v1/search", lambda route: route.abort())
    drop(page, query_view("coffee"))
    expect(alert).to_contain_text("The server cannot be reached.")


def test_a_partial_answer_is_marked_and_asked_again(visit):
    page = visit()

    def halve(route: Route) -> None:
        answer = route.fetch().json()
        route.fulfill(json={**answer, "coverage": 0.5, "partial": True})

    page.route("**/v1/search", halve)
    search(page, ABSENT, "Nothing found")
    expect(page.locator("#partial")).to_contain_text("Only 50 % of the collection could be searched")
    expect(page.locator(".verdict")).to_contain_text("in the part of the collection that was searched")
    keep_screenshot(page, "partial")
    page.unroute_all()
    page.get_by_role("button", name="Search again").click()
    expect(page.locator("#partial")).to_have_count(0)


def test_a_file_that_is_too_large_is_made_smaller_before_it_is_sent(visit):
    page = visit()

    def limit(route: Route) -> None:
        index = route.fetch().json()
        index["limits"]["body_limit_bytes"] = 60_000
        index["uri_prefixes"] = []
        route.fulfill(json=index)

    page.route("**/v1/index", limit)
    page.reload()
    expect(page.get_by_role("button", name="Search with")).to_have_count(12)
    expect(page.get_by_label("Address of a picture")).to_be_hidden()
    large = encode_jpeg(np.kron(read_photo("coffee"), np.ones((6, 6, 1), np.uint8)), 95)
    with page.expect_request("**/v1/search") as sent:
        drop(page, large)
    assert len(sent.value.post_data_json["image"]) < len(large)
    expect(page.get_by_role("heading", name="Found")).to_be_visible()


def test_tab_goes_from_the_top_to_the_answer_and_more_can_be_shown(visit):
    page = visit("/?image=0&k=4")
    expect(page.locator(".verdict")).to_be_visible()
    page.locator(".brand").focus()
    page.keyboard.press("Shift+Tab")
    order = ["skip"] if page.locator(".skip").evaluate("link => link === document.activeElement") else []
    for _ in range(8):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert order[:3] == ["skip", "brand", "forget-key"]
    assert order[3:] == ["file", "add-frame", "other", "url", "plain", "hit"]
    shown = page.locator(".hit").count()
    page.get_by_role("button", name="Show more").click()
    expect(page.locator(".hit").nth(shown)).to_be_focused()
    assert "k=8" in page.url
