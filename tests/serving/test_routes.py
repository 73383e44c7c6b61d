"""Every route over a real run: the real router and replicas in this process, two groups, no Ray."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import cv2
import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ckn_scale.cli.main import app
from ckn_scale.core.augmentations import render_view
from ckn_scale.core.evidence import Evidence
from ckn_scale.core.images import decode_jpeg, encode_jpeg
from ckn_scale.demo import PHOTOS, read_photo
from ckn_scale.errors import InputError
from ckn_scale.search.engine import open_index
from ckn_scale.search.evidence import GroupCandidates
from ckn_scale.serving.api import make_api
from ckn_scale.serving.expansion import GroupsAsCandidates
from ckn_scale.serving.replicas import EncoderReplica, ShardReplica
from ckn_scale.serving.rounds import Rounds
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

NUM_GROUPS = 2


@pytest.fixture(scope="module")
def parts(photo_run):
    """What a server consists of, but for HTTP."""
    settings = ServeSettings(run_url=str(photo_run), shard_groups=NUM_GROUPS, require_keys=False)
    return SimpleNamespace(
        settings=settings,
        encoder=EncoderReplica(settings),
        groups=[ShardReplica(settings, group) for group in range(NUM_GROUPS)],
        version=describe_version(RunFolder.open(str(photo_run)), 1, NUM_GROUPS),
    )


@pytest.fixture(scope="module")
def index(photo_run):
    return open_index(photo_run)


@pytest.fixture
def call(parts):
    """`call(method, path, …)` → the answer of a server with these parts."""

    def ask(method, path, **options):
        async def run():
            settings = parts.settings.model_copy(update=options.pop("settings", {}))
            router = SearchRouter(settings, parts.version, parts.encoder, parts.groups)
            transport = httpx.ASGITransport(make_api(router))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    return ask


def photo_file(place=0, view=None, quality=90):
    photo = read_photo(PHOTOS[place])
    return encode_jpeg(photo if view is None else render_view(photo, view, 1), quality)


def as_text(data):
    return base64.b64encode(data).decode()


def assert_error(answer, status, code, *words):
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    for word in words:
        assert word in answer.json()["error"]["message"]
    return answer.json()["error"]


def without_times(answer):
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("timings_ms", "request_id")}


def test_a_search_answers_like_an_index_in_this_process(call, index):
    body = call("POST", "/v1/search", json={"image": as_text(photo_file(view="tilt")), "k": 5}).json()
    expected = index.search(photo_file(view="tilt"), k=5)
    assert body["hits"] == [json.loads(json.dumps(hit.to_form())) for hit in expected]
    assert body["found"] is expected.found is True
    rule = {"min_inliers": index.calibration.min_inliers, "false_alarm_rate": 1e-6}
    assert body["decision"] == rule
    assert (body["version"], body["coverage"], body["partial"]) == (1, 1.0, False)
    assert body["timings_ms"].keys() == {"encode", "search", "evidence", "total"}
    assert len(body["request_id"]) == 16


def test_the_body_may_be_json_a_form_or_the_file_itself(call):
    data, fields = photo_file(view="tilt"), {"k": 3, "box": [10, 10, 300, 200], "filter": ["image_id<9"]}
    text = as_text(data)
    expected = without_times(call("POST", "/v1/search", json={"image": text, **fields}))
    assert expected["hits"]
    lines = "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for image in (lines, f"data:image/jpeg;base64,{text}", f"data:image/jpeg;base64,\n{lines}\n"):
        assert without_times(call("POST", "/v1/search", json={"image": image, **fields})) == expected
    form = {"k": "3", "box": "[10, 10, 300, 200]", "filter": '["image_id<9"]', "version": "null"}
    for texts in (form, {**form, "box": "10,10,300,200", "filter": "image_id<9", "verify": "true"}):
        answer = call("POST", "/v1/search", data=texts, files={"image": ("a.jpg", data, "image/jpeg")})
        assert without_times(answer) == expected
    query = "k=3&box=10,10,300,200&filter=image_id<9"
    for kind in ("image/jpeg", "application/octet-stream", "image/x-whatever; a=b"):
        headers = {"content-type": kind}
        answer = call("POST", f"/v1/search?{query}", content=data, headers=headers)
        assert without_times(answer) == expected
    # What the body says comes before the query string.
    answer = call("POST", f"/v1/search?{query}&offset=2", json={"image": text, "offset": 0})
    assert without_times(answer) == expected


JPEG = {"content-type": "image/jpeg"}
IMAGE = as_text(photo_file())
BOUNDARY = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"--x", {"content-type": "multipart/form-data"}, "needs a boundary"),
        (b"what is this", BOUNDARY, "cannot be read"),
        (b"--x--\r\n", BOUNDARY, "no file part image"),
        (b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n--x--\r\n', BOUNDARY, "no file part"),
        (
            b'--x\r\nContent-Disposition: form-data; name="other"; filename="a"\r\n\r\n3\r\n--x--\r\n',
            BOUNDARY,
            "one file is taken",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n3\r\n--x--\r\n',
            BOUNDARY,
            "cannot be read",
        ),
        (b'--x\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n' * 40, BOUNDARY, "too many parts"),
        (b"--x\r\nContent-Type: a\r\n\r\n3\r\n--x--\r\n", BOUNDARY, "cannot be read"),
    ],
)
def test_a_broken_form_is_told_what_is_wrong(call, body, headers, words):
    assert_error(call("POST", "/v1/search", content=body, headers=headers), 400, "bad_request", words)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("k=0", "k: Input should be greater"),
        ("k=x", "k: Input should be a valid integer"),
        ("k=1&k=2", "k is given twice"),
        ("box=1,2,3", "box"),
        ("box=nan,0,1,1", "box"),
        ("box=0,0,inf,1", "box"),
        ("filter=[1", "filter: a list of them must be JSON"),
        ("filter=[1]", "filter"),
        ("filter=year", "a filter is COLUMN OPERATOR VALUE"),
        ("filter=year>1", "no such column"),
        ("kk=3", "kk: Extra inputs"),
        ("version=0", "version"),
    ],
)
def test_bad_fields_of_a_query_string_are_told(call, query, words):
    headers = {"content-type": "image/jpeg"}
    answer = call("POST", f"/v1/search?{query}", content=photo_file(), headers=headers)
    assert_error(answer, 400, "bad_request", words)


def test_pages_of_an_answer_make_the_whole_and_weak_hits_can_be_left_out(call):
    image = as_text(photo_file(view="tilt"))
    whole = call("POST", "/v1/search", json={"image": image, "k": 16}).json()
    pages = [call("POST", "/v1/search", json={"image": image, "k": 5, "offset": at}).json() for at in (0, 5)]
    assert [hit for page in pages for hit in page["hits"]] == whole["hits"][:10]
    assert [page["found"] for page in pages] == [True, True], "on whatever page the match is"
    for verify in (True, False):
        fields = {"image": image, "k": 16, "verify": verify}
        scores = [hit["score"] for hit in call("POST", "/v1/search", json=fields).json()["hits"]]
        least = scores[3]
        strong = call("POST", "/v1/search", json={**fields, "min_score": least}).json()["hits"]
        assert [hit["score"] for hit in strong] == [score for score in scores if score >= least]


@pytest.mark.parametrize("expand", [True, "discriminative"])
def test_an_expanded_search_is_that_of_one_process(call, index, expand):
    data = photo_file(view="tilt")
    body = call("POST", "/v1/search", json={"image": as_text(data), "k": 16, "expand": expand}).json()
    expected = index.search(data, k=16, expand=expand)
    assert body["hits"] == [json.loads(json.dumps(hit.to_form())) for hit in expected]
    plain = index.search(data, k=16)
    assert [hit.score for hit in expected] != [hit.score for hit in plain], "something was expanded"
    assert "expand" in body["timings_ms"]
    raw = call("POST", f"/v1/search?k=16&expand={str(expand).lower()}", content=data, headers=JPEG)
    assert raw.json()["hits"] == body["hits"]
    answer = call("POST", "/v1/search", json={"image": as_text(data), "expand": expand, "verify": False})
    assert_error(answer, 400, "bad_request", "exclude each other")


@pytest.mark.parametrize("options", [{}, {"expand": True}, {"verify": False}, {"filter": "image_id<12"}])
def test_similar_images_are_those_of_one_process_without_the_image_itself(call, index, options):
    body = call("GET", "/v1/similar/3", params={"k": 16, **options}).json()
    expected = index.similar(3, k=16, **options)
    assert body["hits"] == [json.loads(json.dumps(hit.to_form())) for hit in expected]
    others = {one for one in range(12 if "filter" in options else 16) if one != 3}
    assert {hit["image_id"] for hit in body["hits"]} == others
    second = call("GET", "/v1/similar/3", params={"k": 4, "offset": 4, **options}).json()
    assert second["hits"] == body["hits"][4:8]


def test_similar_says_what_is_wrong(call):
    assert_error(call("GET", "/v1/similar/99"), 404, "not_found", "no image 99")
    assert_error(call("GET", f"/v1/similar/{2**63}"), 400, "bad_request", "image_id")
    assert_error(call("GET", "/v1/similar/3?box=0,0,5,5"), 400, "bad_request", "as a whole")
    assert_error(call("GET", "/v1/similar/3?k=x"), 400, "bad_request", "k:")
    assert_error(call("GET", "/v1/similar/3?version=9"), 404, "not_found", "version 9")


def photo_id(index, place):
    """The id of a photograph."""
    return next(one for one in range(16) if f"/{PHOTOS[place]}.jpg" in index.shards.look_up(one).uri)


def test_two_images_are_matched_whether_files_or_indexed(call, index):
    data, original, image_id = photo_file(view="tilt"), photo_file(quality=92), photo_id(index, 0)
    hit = next(hit for hit in index.search(data, k=16) if hit.image_id == image_id)
    body = call("POST", "/v1/match", json={"image": as_text(data), "image_id": image_id}).json()
    assert (body["match"], body["inliers"], body["score"]) == (True, hit.inliers, hit.score)
    assert np.allclose(body["transform"], hit.transform)
    assert np.allclose(body["box"], hit.box)
    tilted = render_view(read_photo(PHOTOS[0]), "tilt", 1)
    assert body["sizes"] == [list(tilted.shape[1::-1]), list(read_photo(PHOTOS[0]).shape[1::-1])]
    assert body["decision"]["min_inliers"] == index.calibration.min_inliers
    assert (body["version"], body["timings_ms"].keys()) == (1, {"encode", "match", "total"})
    pairs = np.array(body["matches"])
    assert len(pairs) >= body["inliers"]
    mapped = np.c_[pairs[:, :2], np.ones(len(pairs))] @ np.array(body["transform"]).T
    distances = np.linalg.norm(mapped[:, :2] / mapped[:, 2:] - pairs[:, 2:], axis=1)
    assert np.median(distances) < 5, "in pixels of the upright originals"
    files = call("POST", "/v1/match", json={"image": as_text(data), "other": as_text(original)}).json()
    assert files["inliers"] == body["inliers"], "a file is matched as if it were indexed"
    assert files["matches"] == body["matches"]
    stored = call("POST", "/v1/match", json={"image_id": image_id, "other_id": image_id}).json()
    assert stored["match"]
    assert np.allclose(stored["transform"], np.eye(3), atol=0.05)
    other = call("POST", "/v1/match", json={"image_id": image_id, "other_id": photo_id(index, 1)}).json()
    assert (other["match"], other["inliers"] < body["inliers"]) == (False, True)


def test_a_part_of_an_image_is_matched(call, index):
    data, image_id = photo_file(), photo_id(index, 0)
    height, width = read_photo(PHOTOS[0]).shape[:2]
    box = [width // 4, height // 4, 3 * width // 4, 3 * height // 4]
    body = call("POST", "/v1/match", json={"image": as_text(data), "image_id": image_id, "box": box}).json()
    pairs = np.array(body["matches"])
    assert body["match"]
    assert np.median(np.abs(pairs[:, :2] - pairs[:, 2:])) < 3, "pixels are those of the whole image"
    assert pairs[:, 0].min() >= box[0] - 1
    assert body["sizes"][0] == [box[2] - box[0], box[3] - box[1]]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"image": IMAGE}, 400, "give image and image_id"),
        ({}, 400, "give image and image_id"),
        ({"image": IMAGE, "image_id": 1, "other_id": 2}, 400, "give image and image_id"),
        ({"image_id": 1, "other_id": 2, "box": [0, 0, 5, 5]}, 400, "a box goes with image"),
        ({"image_id": -1, "other_id": 2}, 400, "image_id"),
        ({"image": "!!", "image_id": 1}, 400, "image must be base64"),
        ({"image_id": 1, "other_id": 99}, 404, "no image 99"),
        ({"image_id": 99, "other_id": 1}, 404, "no image 99"),
        ({"image": IMAGE, "image_id": 1, "box": [5, 0, 1, 1]}, 400, "x1 < x2"),
        ({"image": "YWJj", "image_id": 1}, 422, "cannot be used"),
        ({"image": IMAGE, "other": "YWJj"}, 422, "the other image"),
    ],
)
def test_a_match_says_what_is_wrong(call, fields, status, words):
    codes = {400: "bad_request", 404: "not_found", 422: "image_rejected"}
    assert_error(call("POST", "/v1/match", json=fields), status, codes[status], words)


def test_a_match_takes_json_only(call):
    answer = call("POST", "/v1/match", content=photo_file(), headers=JPEG)
    assert_error(answer, 415, "unsupported_media_type", "application/json")


def test_a_version_in_memory_may_be_asked_for(call):
    image = as_text(photo_file())
    assert call("POST", "/v1/search", json={"image": image, "version": 1}).json()["version"] == 1
    answer = call("POST", "/v1/search", json={"image": image, "version": 7})
    assert assert_error(answer, 404, "not_found", "version 7 is not in memory")["resident"] == [1]


def test_the_index_describes_itself(call, index):
    body = call("GET", "/v1/index").json()
    certificate = body.pop("certificate")
    assert certificate["queries"] > 0
    limits = {"max_k": 1000, "max_batch": 32, "body_limit_bytes": 16 * 2**20, "pixels": 100_000_000}
    assert body == {
        "version": 1,
        "images": 16,
        "dim": index.dim,
        "kind": "signs",
        "shards": 2,
        "groups": 2,
        "can_verify": True,
        "uri_prefixes": [],
        "limits": limits,
    }
    versions = call("GET", "/v1/versions").json()
    (version,) = versions.pop("versions")
    assert versions == {"current": 1, "resident": [1]}
    assert (version["version"], version["rows"], len(version["build"]) > 0) == (1, 16, True)


def test_an_indexed_image_is_described(call, index):
    hit = index.search(photo_file(), k=1)[0]
    body = call("GET", f"/v1/images/{hit.image_id}").json()
    height, width = read_photo(PHOTOS[0]).shape[:2]
    assert body == {
        "image_id": hit.image_id,
        "uri": hit.uri,
        "columns": {},
        "state": "ok",
        "width": width,
        "height": height,
        "version": 1,
        "original": False,
    }
    thumbnail = call("GET", f"/v1/images/{hit.image_id}/thumbnail")
    assert thumbnail.headers["content-type"] == "image/jpeg"
    assert thumbnail.content == index.thumbnail(hit.image_id)
    for path in ("/v1/images/16", "/v1/images/16/thumbnail", f"/v1/images/{2**63 - 1}"):
        assert_error(call("GET", path), 404, "not_found", "image")
    for path in ("/v1/images/-1", "/v1/images/x", f"/v1/images/{2**63}", "/v1/images/1.5"):
        assert_error(call("GET", path), 400, "bad_request", "image_id")


def test_examples_are_the_same_for_any_number_of_groups(call, photo_run, parts):
    body = call("GET", "/v1/examples?count=5").json()
    assert body["version"] == 1
    assert len({one["image_id"] for one in body["images"]}) == 5
    assert body["images"] == call("GET", "/v1/examples").json()["images"][:5]
    for one in body["images"]:
        assert call("GET", f"/v1/images/{one['image_id']}").json()["uri"] == one["uri"]
    alone = ShardReplica(ServeSettings(run_url=str(photo_run)), 0)
    drawn = asyncio.run(alone.draw(1, 5))
    assert drawn.image_ids.tolist() == [one["image_id"] for one in body["images"]]
    for count in ("0", "101", "x"):
        assert_error(call("GET", f"/v1/examples?count={count}"), 400, "bad_request", "count")


def lying_file(form):
    """A photograph stored on its side, with the orientation that stands it up."""
    pixels = cv2.resize(read_photo(PHOTOS[0]), (1500, 900))
    exif = Image.Exif()
    exif[0x0112] = 6
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, form, exif=exif)
    return pixels, sink.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
def test_a_preview_is_an_upright_jpeg_of_at_most_1024_pixels(call, form):
    pixels, data = lying_file(form)
    answer = call("POST", "/v1/preview", content=data, headers={"content-type": "image/heic"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    assert (answer.headers["x-image-width"], answer.headers["x-image-height"]) == ("900", "1500")
    shown = decode_jpeg(answer.content)
    assert shown.shape == (1024, 615, 3)
    upright = cv2.resize(
        np.ascontiguousarray(np.rot90(pixels, -1)), (615, 1024), interpolation=cv2.INTER_AREA
    )
    assert np.abs(shown.astype(int) - upright).mean() < 6


def test_what_is_no_image_has_no_preview(call):
    headers = {"content-type": "application/octet-stream"}
    answer = call("POST", "/v1/preview", content=b"no image", headers=headers)
    assert assert_error(answer, 422, "image_rejected")["state"] == "unsupported"
    answer = call("POST", "/v1/preview", content=b"{}", headers={"content-type": "text/html"})
    assert_error(answer, 415, "unsupported_media_type", "text/html")


def test_a_batch_answers_each_query_in_its_place(call):
    fields = {"image": as_text(photo_file(view="tilt")), "k": 3}
    single = without_times(call("POST", "/v1/search", json=fields))
    queries = [
        fields,
        {"image": "!!"},
        {**fields, "k": 5000},
        {"image": "YWJj"},
        {**fields, "verify": False},
        7,
    ]
    body = call("POST", "/v1/search:batch", json={"queries": queries, "version": 1}).json()
    assert (body["version"], len(body["results"])) == (1, 6)
    first, *others = body["results"]
    assert {name: first[name] for name in single} == single
    codes = ["bad_request", "bad_request", "image_rejected", None, "bad_request"]
    assert [one.get("error", {}).get("code") for one in others] == codes
    assert "found" not in others[3]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "queries must be a list of 1 to 2"),
        ({"queries": []}, 400, "queries must be a list of 1 to 2"),
        ({"queries": [{}, {}, {}]}, 400, "got 3"),
        ({"queries": [{}], "k": 3}, 400, "got also ['k']"),
        ({"queries": [{}], "version": 9}, 404, "version 9"),
        ({"queries": [{}], "version": "x"}, 400, "version"),
    ],
)
def test_a_batch_says_what_is_wrong(call, body, status, words):
    answer = call("POST", "/v1/search:batch", json=body, settings={"max_batch": 2})
    assert_error(answer, status, "not_found" if status == 404 else "bad_request", words)


def test_a_query_of_a_batch_has_no_version_of_its_own(call):
    queries = [{"image": IMAGE, "version": 1}]
    body = call("POST", "/v1/search:batch", json={"queries": queries}).json()
    assert "a batch has one for all" in body["results"][0]["error"]["message"]
    answer = call("POST", "/v1/search:batch", content=b"x", headers=JPEG)
    assert_error(answer, 415, "unsupported_media_type", "application/json")


def test_originals_are_given_out_below_listed_prefixes_only(call, index):
    uri = index.shards.look_up(3).uri
    folder, name = uri.rsplit("/", 1)
    assert_error(call("GET", "/v1/images/3/original"), 403, "forbidden")
    for prefix in (folder, f"{folder}/"):
        allowed = {"uri_prefixes": (prefix,)}
        answer = call("GET", "/v1/images/3/original", settings=allowed)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        assert answer.content == Path(uri).read_bytes()
        assert call("GET", "/v1/images/3", settings=allowed).json()["original"]
        assert call("GET", "/v1/index", settings=allowed).json()["uri_prefixes"] == [prefix]
    for prefix in (folder[:-1], f"{folder}/{name[:3]}", "s3://bucket/", "http://127.0.0.1/"):
        assert_error(
            call("GET", "/v1/images/3/original", settings={"uri_prefixes": (prefix,)}), 403, "forbidden"
        )
    assert_error(call("GET", "/v1/images/99/original", settings=allowed), 404, "not_found", "no image 99")


def test_a_uri_is_previewed_where_it_may_be_fetched(call, index):
    uri = index.shards.look_up(3).uri
    allowed = {"uri_prefixes": (uri.rsplit("/", 1)[0],)}
    answer = call("POST", "/v1/preview", json={"uri": uri}, settings=allowed)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
    assert_error(call("POST", "/v1/preview", json={"uri": uri}), 403, "forbidden")
    missing = f"{uri}.gone"
    assert_error(call("POST", "/v1/preview", json={"uri": missing}, settings=allowed), 404, "not_found")
    assert_error(call("POST", "/v1/preview", json={"url": uri}, settings=allowed), 400, "bad_request", "uri")


def test_the_documentation_is_a_page_of_our_own(call):
    page = call("GET", "/docs")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/docs", "/docs/docs.js", "/docs/docs.css"):
        answer = call("GET", path)
        assert answer.status_code == 200
        assert "://" not in answer.text


def test_the_description_names_every_route_and_resolves(call):
    described = call("GET", "/openapi.json").json()
    assert {
        "/v1/search", "/v1/search:batch", "/v1/similar/{image_id}", "/v1/match", "/v1/images/{image_id}",
        "/v1/images/{image_id}/thumbnail", "/v1/images/{image_id}/original", "/v1/preview", "/v1/examples",
        "/v1/index", "/v1/versions", "/healthz", "/readyz",
    } <= described["paths"].keys()  # fmt: skip
    assert "$defs" not in json.dumps(described)
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
        assert name in described["components"]["schemas"]


def test_answering_reads_nothing_from_the_store(call, index, monkeypatch):
    """Rows, points and codes lie on the disk of this node."""
    asked = []
    for name in ("read", "read_range", "list", "list_folders", "size", "exists", "modified_at"):
        monkeypatch.setattr(Store, name, lambda *arguments, name=name: asked.append((name, arguments[1:])))
    body = call("POST", "/v1/search", json={"image": as_text(photo_file(2)), "k": 16}).json()
    assert (len(body["hits"]), body["coverage"]) == (16, 1.0)
    assert call("GET", "/v1/images/3").status_code == 200
    assert asked == []


class DyingReplica:
    """A group that answers until it is asked for this."""

    def __init__(self, replica, dies_at):
        self._replica, self._dies_at = replica, dies_at

    def __getattr__(self, name):
        return self._die if name == self._dies_at else getattr(self._replica, name)

    async def _die(self, *arguments):
        raise RuntimeError("the replica died")


@pytest.mark.parametrize("dies_at", ["compare", "load_vectors"])
def test_a_group_that_dies_in_an_expansion_is_left_out_of_all_of_it(call, parts, monkeypatch, dies_at):
    """The answer is the one without that group from the beginning."""
    index_of_group = [
        {one for one in range(16) if parts.version.group_of(one) == group} for group in range(NUM_GROUPS)
    ]
    fields = {"image": as_text(photo_file(view="tilt")), "k": 16, "expand": "discriminative"}
    lost = 1 - parts.version.group_of(call("POST", "/v1/search", json=fields).json()["hits"][0]["image_id"])
    answers = []
    for moment in ("find", dies_at):
        groups = list(parts.groups)
        groups[lost] = DyingReplica(groups[lost], moment)
        monkeypatch.setattr(parts, "groups", groups)
        answers.append(without_times(call("POST", "/v1/search", json=fields)))
        monkeypatch.undo()
    assert answers[0] == answers[1]
    assert answers[0]["partial"]
    assert {hit["image_id"] for hit in answers[0]["hits"]} == index_of_group[1 - lost]


def test_an_index_says_what_it_cannot_match_or_compare(index):
    with pytest.raises(InputError, match="has no image 99"):
        index.similar(99)
    with pytest.raises(InputError, match="has no image 99"):
        index.match(photo_file(), 99)
    with pytest.raises(ValueError, match="a box goes with an image"):
        index.match(3, 4, box=(0, 0, 5, 5))


def test_the_command_line_asks_for_indexed_images(photo_run, index):
    def ask(*arguments):
        return CliRunner().invoke(app, ["search", str(photo_run), *arguments])

    found = json.loads(ask("--id", "3", "--id", "4", "-k", "2", "--json").stdout)
    for result, image_id in zip(found["results"], (3, 4), strict=True):
        assert result["query"] == image_id
        assert result["hits"] == [hit.to_form() for hit in index.similar(image_id, 2)]
    assert "image 3" in ask("--id", "3").stdout
    for arguments in ((), ("a.jpg", "--id", "3"), ("--id", "3", "--box", "0,0,5,5"), ("--id", "99")):
        assert ask(*arguments).exit_code != 0


def test_hits_that_ask_are_loaded_as_in_one_process(parts, index):
    """Those that verify, too, have more words than are stored."""
    image_ids, link = np.array([3, 12, 5, 9]), Evidence(20, 30, np.eye(3), "affine", (0, 0, 300, 200))
    centroids = parts.encoder._encoders.get(1).points.centroids
    expected = GroupCandidates(index.shards, centroids).load_hits(image_ids, [link] * 4)

    async def load():
        router = SearchRouter(parts.settings, parts.version, parts.encoder, parts.groups)
        rounds, loop = Rounds(router.ask_group, parts.version), asyncio.get_running_loop()
        candidates = GroupsAsCandidates(rounds, lambda hits: parts.encoder.widen(1, hits), loop)
        return await asyncio.to_thread(candidates.load_hits, image_ids, [link] * 4)

    vectors, hits = asyncio.run(load())
    assert np.array_equal(vectors, expected[0])
    assert [hit.words.shape[1] for hit in hits] == [8, 8, 8, 1]
    for hit, other in zip(hits, expected[1], strict=True):
        assert np.array_equal(hit.words, other.words)
        assert np.array_equal(hit.codes, other.codes)
