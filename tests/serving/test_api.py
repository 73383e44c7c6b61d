"""The web application in this process, over stand-ins for the encoder and the shard groups. No Ray."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json

import httpx
import numpy as np
import pytest

from ckn_scale.search.shard import Hit
from ckn_scale.serving import health, limits
from ckn_scale.serving.api import make_api
from ckn_scale.serving.messages import Encoded, Rejected, ServedVersion
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings

IMAGE = base64.b64encode(b"good image").decode()


class FakeEncoder:
    def __init__(self):
        self.versions, self.boxes = [], []
        self.release = asyncio.Event()
        self.release.set()

    async def encode(self, version, data, box):
        self.versions.append(version)
        self.boxes.append(box)
        await self.release.wait()
        if data == b"crash":
            raise RuntimeError("the replica died")
        return Encoded(np.ones(2)) if data == b"good image" else Rejected("corrupt", "no image in it")

    async def prepare(self, version):
        return True


class FakeGroup:
    def __init__(self, first_id):
        self.hits = [
            Hit(
                first_id,
                f"a/{first_id}.jpg",
                0.5,
                {"taken": datetime.date(2020, 1, 2), "raw": b"\xff", "share": float("nan")},
            ),
            Hit(first_id + 1, f"a/{first_id + 1}.jpg", 0.25 - first_id / 1000),
        ]
        self.failure = None
        self.delay_s = 0.0
        self.held = {1}
        self.calls = 0

    async def search(self, version, vector, k, wanted):
        self.calls += 1
        await asyncio.sleep(self.delay_s)
        if self.failure:
            raise self.failure
        return self.hits[:k]

    async def thumbnail(self, version, image_id):
        if self.failure:
            raise self.failure
        return b"jpeg" if image_id == self.hits[0].image_id else None

    async def prepare(self, version):
        return version in self.held


class Server:
    def __init__(self, **settings):
        defaults = {"run_url": "run", "shard_groups": 2, "require_keys": False, "shard_timeout_s": 0.2}
        version = ServedVersion(1, (30, 10), ((0, 9, 0), (10, 19, 1)))
        self.encoder, self.groups = FakeEncoder(), [FakeGroup(0), FakeGroup(10)]
        checked = ServeSettings(**{**defaults, **settings})
        self.router = SearchRouter(checked, version, self.encoder, self.groups)
        transport = httpx.ASGITransport(make_api(self.router), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

    async def search(self, image=IMAGE, headers=None, **fields):
        return await self.client.post("/v1/search", json={"image": image, **fields}, headers=headers)


def with_server(check, **settings):
    """Runs `check(server)` in a fresh event loop."""

    async def run():
        server = Server(**settings)
        async with server.client:
            return await check(server)

    return asyncio.run(run())


def assert_error(answer, status, code, *words):
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    for word in words:
        assert word in error["message"]
    return error


def test_search_merges_the_groups_and_keeps_the_stable_form():
    async def check(server):
        answer = await server.search(k=3, box=[1, 2, 30, 40])
        body = answer.json()
        assert answer.status_code == 200
        assert [hit["image_id"] for hit in body["hits"]] == [0, 10, 1]
        assert body["hits"][0]["columns"] == {"taken": "2020-01-02", "raw": "_w==", "share": None}
        assert (body["version"], body["coverage"], body["partial"]) == (1, 1.0, False)
        assert set(body["timings_ms"]) == {"encode", "search", "total"}
        assert "found" not in body
        assert body["hits"][0].keys() == {"image_id", "uri", "score", "columns"}
        assert server.encoder.boxes == [(1, 2, 30, 40)]

    with_server(check)


@pytest.mark.parametrize("trouble", ["dead", "slow", "other version"])
def test_a_group_in_trouble_gives_a_partial_answer_with_its_coverage(trouble):
    async def check(server):
        group = server.groups[1]
        group.failure = None if trouble == "slow" else RuntimeError(trouble)
        group.delay_s = 5.0 if trouble == "slow" else 0.0
        body = (await server.search()).json()
        assert (body["partial"], body["coverage"]) == (True, 0.75)
        assert [hit["image_id"] for hit in body["hits"]] == [0, 1]
        assert_error(await server.search(strict=True), 503, "unavailable", "only 75.0% of the index")

    with_server(check)


def test_nobody_waits_for_a_group_that_hangs_until_it_answers_again(monkeypatch):
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 0.01)

    async def check(server):
        group = server.groups[1]
        group.delay_s, group.held = 5.0, None  # a probe fails, too
        assert (await server.search()).json()["partial"]
        while 1 not in server.router._hung:
            await asyncio.sleep(0.01)
        calls = group.calls
        for _ in range(3):
            assert (await server.search()).json()["partial"]
        assert_error(await server.client.get("/v1/images/10/thumbnail"), 503, "unavailable", "image 10")
        assert group.calls == calls == 1
        group.delay_s, group.held = 0.0, {1}
        while (await server.search()).json()["partial"]:
            await asyncio.sleep(0.01)

    with_server(check)


def test_a_group_that_is_only_busy_is_asked_again():
    async def check(server):
        group = server.groups[1]
        group.delay_s = 5.0
        assert (await server.search()).json()["partial"]
        group.delay_s = 0.0
        assert not (await server.search()).json()["partial"]
        assert group.calls == 2

    with_server(check)


def test_no_group_at_all_is_unavailable():
    async def check(server):
        for group in server.groups:
            group.failure = RuntimeError("dead")
        answer = await server.search()
        assert_error(answer, 503, "unavailable", "no part of the index")
        assert answer.headers["retry-after"] == "2"

    with_server(check)


def test_a_silent_encoder_is_unavailable():
    async def check(server):
        assert_error(await server.search(base64.b64encode(b"crash").decode()), 503, "unavailable", "encoder")
        server.encoder.release.clear()
        assert_error(await server.search(), 503, "unavailable", "encoder")

    with_server(check, encode_timeout_s=0.1)


def test_a_bad_image_is_an_error_with_state_and_reason():
    async def check(server):
        answer = await server.search(base64.b64encode(b"junk").decode())
        error = assert_error(answer, 422, "image_rejected", "corrupt", "no image in it")
        assert (error["state"], error["reason"]) == ("corrupt", "no image in it")

    with_server(check)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "!!"}, ["base64"]),
        ({"image": "ä"}, ["base64"]),
        ({"image": 5}, ["image must be base64"]),
        ({"image": None}, ["image is missing"]),
        ({"image": "data:image/png,abc"}, ["a data URL must say ;base64"]),
        ({"k": 0}, ["k: Input should be greater than or equal to 1"]),
        ({"k": 11}, ["k must be ≤ 10, got 11"]),
        ({"k": 5, "offset": 6}, ["k and offset together must be ≤ 10, got 11"]),
        ({"box": [0, 0, 1]}, ["box"]),
        ({"box": [5, 0, 5, 9]}, ["x1 < x2"]),
        ({"min_score": 1.5}, ["min_score: Input should be less than or equal to 1"]),
        ({"offset": -1}, ["offset: Input should be greater"]),
        ({"verify": True}, ["this index has no points to verify by"]),
        ({"filter": "year"}, ["a filter is COLUMN OPERATOR VALUE"]),
        ({"filter": ["image_id in @/etc/passwd"]}, ["cannot be read from a file here"]),
        ({"kk": 3}, ["kk: Extra inputs are not permitted"]),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(fields, words):
    async def check(server):
        answer = await server.client.post("/v1/search", json={"image": IMAGE, **fields})
        assert_error(answer, 400, "bad_request", *words)

    with_server(check, max_k=10)


def test_bodies_that_are_no_json_are_refused():
    async def check(server):
        headers = {"content-type": "application/json"}
        for body in (b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000):
            answer = await server.client.post("/v1/search", content=body, headers=headers)
            assert_error(answer, 400, "bad_request")
        answer = await server.client.post("/v1/search", content=b"{}", headers={"content-type": "text/plain"})
        assert_error(answer, 415, "unsupported_media_type", "application/json")
        answer = await server.client.post("/v1/search", data={"image": IMAGE})
        assert_error(answer, 415, "unsupported_media_type", "urlencoded")

    with_server(check)


def test_a_declared_body_beyond_the_limit_is_refused():
    async def check(server):
        headers = {"content-type": "application/json", "content-length": "5000"}
        answer = await server.client.post("/v1/search", content=b"{", headers=headers)
        assert_error(answer, 413, "body_too_large", "larger than")

    with_server(check, body_limit_bytes=2048)


def test_a_streamed_body_that_passes_the_limit_is_refused_after_a_while(monkeypatch):
    """Not at once: who is still sending would not hear it."""
    monkeypatch.setattr(limits, "DISCARDED_BYTES", 2048)

    async def check(server):
        sent = []

        async def trickle():
            for _ in range(1000):
                sent.append(1)
                yield b"x" * 512

        headers = {"content-type": "application/json"}
        answer = await server.client.post("/v1/search", content=trickle(), headers=headers)
        assert_error(answer, 413, "body_too_large")
        assert 4 < len(sent) <= 10

    with_server(check, body_limit_bytes=2048)


def test_a_body_that_never_ends_is_given_up():
    async def check(server):
        async def stall():
            yield b"{"
            await asyncio.sleep(60)

        headers = {"content-type": "application/json"}
        answer = await server.client.post("/v1/search", content=stall(), headers=headers)
        assert_error(answer, 408, "body_timeout", "0.1 s")
        assert answer.headers["connection"] == "close"

    with_server(check, body_timeout_s=0.1)
    with_server(check, body_grace_s=0.1)


def test_bodies_on_their_way_hold_no_place_and_the_slowest_gives_way():
    async def check(server):
        begun, goes_on = [], asyncio.Event()

        async def trickle(size):
            yield b"x" * size
            begun.append(size)
            await goes_on.wait()

        headers = {"content-type": "application/json"}
        sizes = (20_000, 1, 10_000)
        slow = []
        for i, size in enumerate(sizes):
            request = server.client.post("/v1/search", content=trickle(size), headers=headers)
            slow.append(asyncio.create_task(request))
            while len(begun) <= i:
                await asyncio.sleep(0)
        assert (await server.search()).status_code == 200
        assert_error(await slow[1], 429, "too_busy", "came the slowest")
        goes_on.set()
        for i in (0, 2):
            assert_error(await slow[i], 400, "bad_request")
        assert (await server.search()).status_code == 200

    with_server(check, max_in_flight=3, max_bodies=3)


def test_more_searches_than_places_get_429_and_places_come_free_again():
    async def check(server):
        server.encoder.release.clear()
        waiting = [asyncio.create_task(server.search()) for _ in range(2)]
        while len(server.encoder.versions) < 2:
            await asyncio.sleep(0)
        answer = await server.search()
        assert_error(answer, 429, "too_busy", "2 searches are under way")
        assert answer.headers["retry-after"] == "1"
        assert (await server.client.get("/healthz")).status_code == 200
        server.encoder.release.set()
        assert [(await one).status_code for one in waiting] == [200, 200]
        assert (await server.search()).status_code == 200

    with_server(check, max_in_flight=2)


def test_thumbnails_come_from_the_group_that_owns_the_image():
    async def check(server):
        answer = await server.client.get("/v1/images/10/thumbnail")
        assert (answer.status_code, answer.content) == (200, b"jpeg")
        assert answer.headers["content-type"] == "image/jpeg"
        assert_error(await server.client.get("/v1/images/11/thumbnail"), 404, "not_found", "image 11")
        assert_error(await server.client.get("/v1/images/999/thumbnail"), 404, "not_found")
        assert_error(await server.client.get("/v1/images/x/thumbnail"), 400, "bad_request", "image_id")
        server.groups[1].failure = RuntimeError("dead")
        assert_error(await server.client.get("/v1/images/10/thumbnail"), 503, "unavailable", "image 10")

    with_server(check)


def test_readiness_names_the_parts_that_are_missing():
    async def check(server):
        body = {"ready": True, "version": 1, "images": 40, "not_ready": []}
        assert (await server.client.get("/readyz")).json() == body
        server.groups[1].held = set()
        answer = await server.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["not_ready"] == ["shards-1"]
        assert (await server.client.get("/healthz")).json() == {"status": "ok"}

    with_server(check)


def test_a_request_keeps_the_version_it_began_with():
    async def check(server):
        server.encoder.release.clear()
        early = asyncio.create_task(server.search())
        while not server.encoder.versions:
            await asyncio.sleep(0)
        second = ServedVersion(2, (5, 5), ())
        server.groups[0].held = server.groups[1].held = {1, 2}
        assert await server.router.switch_when_ready(second)
        server.encoder.release.set()
        assert (await early).json()["version"] == 1
        assert (await server.search()).json()["version"] == 2
        assert server.encoder.versions == [1, 2]

    with_server(check)


def test_a_new_version_waits_until_every_group_holds_it():
    async def check(server):
        server.groups[0].held = {1, 2}
        assert not await server.router.switch_when_ready(ServedVersion(2, (5, 5), ()))
        assert (await server.search()).json()["version"] == 1

    with_server(check)


def test_unknown_paths_and_methods_are_json_errors_too():
    async def check(server):
        assert_error(await server.client.get("/nothing"), 404, "not_found", "GET /nothing")
        assert_error(await server.client.get("/v1/search"), 405, "method_not_allowed")
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/docs/../app.py"):
            assert_error(await server.client.get(path), 404, "not_found")

    with_server(check)


def test_a_mistake_of_ours_is_a_json_error_with_a_reference(caplog):
    async def check(server):
        server.router.thumbnail = None
        error = assert_error(await server.client.get("/v1/images/1/thumbnail"), 500, "internal")
        assert error["reference"] in caplog.text
        assert "NoneType" not in json.dumps(error)

    with_server(check)


def test_the_page_loads_nothing_from_elsewhere():
    async def check(server):
        page = await server.client.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for path in ("/", "/page/page.css", "/page/page.js"):
            text = (await server.client.get(path)).text
            assert "http://" not in text
            assert "https://" not in text

    with_server(check)


def test_the_api_describes_itself():
    async def check(server):
        described = (await server.client.get("/openapi.json")).json()
        post = described["paths"]["/v1/search"]["post"]
        assert "image" in post["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {"200", "400", "401", "413", "422", "429", "503"} <= set(post["responses"])

    with_server(check)


def test_the_owner_of_an_image_is_found_by_its_range_of_ids():
    version = ServedVersion(1, (3, 2), ((2, 4, 1), (8, 9, 0)))
    assert [version.group_of(image_id) for image_id in (1, 2, 4, 5, 8, 9, 10)] == [
        None, 1, 1, None, 0, 0, None,
    ]  # fmt: skip
