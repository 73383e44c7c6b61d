"""`ckn_scale.Client` and AsyncClient against a real server, and against one that is busy on purpose."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
from pathlib import Path

import httpx
import pytest
from photo_runs import index_command
from PIL import Image
from running_server import KEY, free_port, query_view

import ckn_scale
from ckn_scale.client import Answer, AsyncClient, Client, Retries
from ckn_scale.client import failures as client_failures
from ckn_scale.client.failures import parse_retry_after
from ckn_scale.core.images import decode_jpeg
from ckn_scale.search.engine import open_index

ONCE = Retries(attempts=1)


@pytest.fixture(scope="module")
def client(local_server):
    with Client(local_server.url, key=KEY) as opened:
        yield opened


def test_an_answer_is_that_of_the_index_in_this_process(client, photo_run):
    view = query_view("coffee")
    here, answer = open_index(photo_run).search(view, k=4), client.search(view, k=4)
    assert [hit.to_form() for hit in answer] == [hit.to_form() for hit in here]
    assert isinstance(answer[0], ckn_scale.Hit)
    assert (answer.found, answer.partial, answer.coverage, len(answer)) == (True, False, 1.0, 4)
    assert answer.timings_ms["total"] > 0
    plain = client.search(view, k=2, verify=False, filter=["uri^=/"])
    assert (plain.found, plain.decision, plain[0].match) == (None, None, None)


def test_an_image_is_given_as_what_one_has(client, tmp_path):
    view = query_view("coffee")
    path = tmp_path / "view.jpg"
    path.write_bytes(view)
    expected = client.search(view, k=3).hits
    pixels = decode_jpeg(view)
    assert client.search(path, k=3).hits == client.search(str(path), k=3).hits == expected
    assert client.search(io.BytesIO(view), k=3).hits == expected
    for image in (pixels, Image.fromarray(pixels), Image.open(path)):
        assert client.search(image, k=3)[0].image_id == expected[0].image_id
    box = (0, 0, pixels.shape[1] / 2, pixels.shape[0])
    assert client.search(view, 1, box)[0].uri == expected[0].uri


def test_pixels_travel_compressed_and_whole():
    pixels = decode_jpeg(query_view("coffee"))
    sent = []

    def answer(request):
        sent.append(request.content)
        return httpx.Response(
            200, json={"version": 1, "hits": [], "coverage": 1, "partial": False, "timings_ms": {}}
        )

    with Client("http://host", transport=httpx.MockTransport(answer)) as one:
        one.search(pixels)
    assert len(sent[0]) < 0.8 * pixels.nbytes
    with Image.open(io.BytesIO(sent[0].partition(b"octet-stream\r\n\r\n")[2])) as image:
        assert (image.format, image.info["compression"]) == ("TIFF", "tiff_adobe_deflate")
        assert (pixels == image).all()


def test_what_the_server_refuses_is_the_error_that_this_process_would_raise(client, local_server, tmp_path):
    view = query_view("coffee")
    with pytest.raises(ckn_scale.ImageRejected) as rejected:
        client.search(b"%PDF no image")
    assert rejected.value.state == "unsupported"
    with pytest.raises(ckn_scale.ImageRejected, match="missing"):
        client.search(tmp_path / "nowhere.jpg")
    with pytest.raises(ckn_scale.InputError, match="must be ≤ 1000"):
        client.search(view, k=5000)
    with pytest.raises(ckn_scale.InputError, match="the index has no such column"):
        client.search(view, filter="year>2000")
    with pytest.raises(ckn_scale.NotFound, match="image 123456"):
        client.thumbnail(123456)
    with Client(local_server.url) as stranger, pytest.raises(ckn_scale.AccessDenied, match="needs a key"):
        stranger.search(view)
    for wrong, kind in (
        ({"k": 0}, ValueError),
        ({"box": (1, 1, 1, 2)}, ValueError),
        ({"kk": 1}, TypeError),
    ):
        with pytest.raises(kind):
            client.search(view, **wrong)
    with pytest.raises(TypeError, match="an image is a path"):
        client.search(None)
    with pytest.raises(ckn_scale.InputError, match="http://host:port, got 'host:8000'"):
        Client("host:8000")


def test_the_index_and_its_images_are_described(client, photo_run):
    here = open_index(photo_run)
    index, versions = client.index(), client.versions()
    assert (index.version, index.images, index.dim) == (here.version, len(here), here.dim)
    assert index.can_verify
    assert index.limits["max_k"] == 1000
    assert versions.current == here.version
    assert versions.versions[-1].rows == len(here)
    hit = client.search(query_view("coffee"), k=1)[0]
    image = client.image(hit.image_id)
    assert (image.uri, image.state, image.columns) == (hit.uri, "ok", {})
    assert (image.width, image.height) == Image.open(io.BytesIO(Path(hit.uri).read_bytes())).size
    assert Image.open(io.BytesIO(client.preview(hit.uri))).format == "JPEG"


def test_options_travel_whole(client):
    view = query_view("coffee")
    best = client.search(view, k=4)
    assert client.search(view, k=2, offset=2).hits == best[2:]
    assert len(client.search(view, k=4, min_score=0.5)) == sum(hit.score >= 0.5 for hit in best)
    assert client.search(view, k=1, version=best.version, strict=True)[0] == best[0]
    with pytest.raises(ckn_scale.NotFound, match="version 99"):
        client.search(view, version=99)
    wanted = [f"image_id!={best[0].image_id}", "uri^=/"]
    assert client.search(view, k=1, filter=wanted, verify=False)[0].image_id != best[0].image_id


def test_indexed_images_ask_as_well_and_two_images_are_compared(client, photo_run):
    index, view = open_index(photo_run), query_view("coffee")
    hit = client.search(view, k=1, expand=True)[0]
    near, here = client.similar(hit.image_id, k=3, filter=["uri^=/"]), index.similar(hit.image_id, 3)
    assert [one.to_form() for one in near] == [one.to_form() for one in here]
    assert hit.image_id not in [one.image_id for one in near]
    by_id, by_file = client.match(view, hit.image_id), client.match(view, hit.uri)
    assert by_id.match
    assert by_id.inliers == hit.inliers
    assert len(by_id.matches) >= by_id.decision.min_inliers
    assert by_file.match
    other = client.similar(hit.image_id, k=1, verify=False)[0]
    assert not client.match(hit.image_id, other.image_id).match
    with pytest.raises(ValueError, match="comes first"):
        client.match(hit.image_id, view)


def test_a_batch_is_answered_in_order_from_one_version(client, tmp_path, monkeypatch):
    monkeypatch.setattr("ckn_scale.client.calls.BATCH_IMAGES", 2)
    views = [query_view(photo) for photo in ("coffee", "astronaut", "rocket")]
    images = [views[0], b"no image", tmp_path / "nowhere.jpg", *views[1:]]
    first, broken, missing, *others = client.search_batch(images, k=2, verify=False)
    for answer, view in zip((first, *others), views, strict=True):
        assert answer.hits == client.search(view, k=2, verify=False).hits
        assert answer.version == first.version
    assert isinstance(broken, ckn_scale.ImageRejected)
    assert (broken.state, missing.state) == ("unsupported", "missing")
    assert client.search_batch([]) == []
    with pytest.raises(ckn_scale.NotFound, match="version 99"):
        client.search_batch(views, version=99)
    (refused,) = client.search_batch(views[:1], k=5000)
    assert isinstance(refused, ckn_scale.InputError)


def test_an_original_that_is_not_given_away_is_refused(client):
    with pytest.raises((ckn_scale.AccessDenied, ckn_scale.NotFound)):
        client.original(0)


def test_a_thumbnail_is_a_jpeg(client):
    assert max(Image.open(io.BytesIO(client.thumbnail(0))).size) <= 96


def test_the_async_client_asks_beside_each_other(local_server):
    async def run():
        async with AsyncClient(local_server.url, key=KEY) as client:
            photos = ("coffee", "astronaut", "rocket")
            answers = await asyncio.gather(*(client.search(query_view(photo), k=1) for photo in photos))
            assert [Path(answer[0].uri).stem for answer in answers] == list(photos)
            assert (await client.thumbnail(0))[:2] == b"\xff\xd8"
            found = answers[0][0].image_id
            assert (await client.match(query_view("coffee"), found)).match
            assert (await client.image(found)).uri == answers[0][0].uri
            assert (await client.index()).version == (await client.versions()).current
            assert len(await client.similar(found, k=2)) == 2
            (batched,) = await client.search_batch([query_view("coffee")], k=1)
            assert batched.hits == answers[0].hits
            assert (await client.preview(query_view("coffee")))[:2] == b"\xff\xd8"
            with pytest.raises(ckn_scale.ImageRejected):
                await client.search(b"no image")

    asyncio.run(run())


class BusyServer:
    """Answers what it was told to, in turn, then the last of it; `waits` has what the client slept."""

    def __init__(self, *answers, monkeypatch):
        self.answers, self.asked, self.waits = list(answers), 0, []
        monkeypatch.setattr("ckn_scale.client.time.sleep", self.waits.append)
        monkeypatch.setattr(client_failures.random, "uniform", lambda low, high: low)

    def __call__(self, request):
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **options):
        return Client("http://host", transport=httpx.MockTransport(self), **options)


def busy(status=429, **headers):
    error = {"code": "too_busy", "message": "try again"}
    return httpx.Response(
        status, json={"error": error}, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


DONE = httpx.Response(200, content=b"jpeg")


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch):
    server = BusyServer(busy(retry_after="3"), busy(503, retry_after="2"), DONE, monkeypatch=monkeypatch)
    with server.client() as client:
        assert client.thumbnail(1) == b"jpeg"
    assert server.waits == [3.0, 2.0]


def test_without_a_time_waits_grow_and_end(monkeypatch):
    server = BusyServer(busy(503), monkeypatch=monkeypatch)
    with server.client() as client, pytest.raises(ckn_scale.ServerBusy, match="try again") as failed:
        client.thumbnail(1)
    assert server.waits == [0.125, 0.25, 0.5, 1.0, 2.0]
    assert (failed.value.status, failed.value.code, failed.value.retry_after_s) == (503, "too_busy", None)


def test_a_wait_beyond_what_one_has_is_not_begun(monkeypatch):
    server = BusyServer(busy(retry_after="3600"), monkeypatch=monkeypatch)
    with server.client() as client, pytest.raises(ckn_scale.ServerBusy) as failed:
        client.thumbnail(1)
    assert (server.asked, server.waits, failed.value.retry_after_s) == (1, [], 3600.0)


def test_a_lost_connection_is_tried_again_and_a_timeout_is_not(monkeypatch):
    server = BusyServer(httpx.ReadError("gone"), httpx.ConnectError("no"), DONE, monkeypatch=monkeypatch)
    with server.client() as client:
        assert client.thumbnail(1) == b"jpeg"
    late = BusyServer(httpx.ReadTimeout("late"), monkeypatch=monkeypatch)
    with late.client() as client, pytest.raises(ckn_scale.ServerUnreachable, match="in time"):
        client.thumbnail(1)
    assert late.asked == 1


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500, json={"error": {"code": "internal", "message": "internal error"}}),
        httpx.Response(500, text="<html>"),
        httpx.Response(200, text="hello"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"version": 1}),
        httpx.Response(302, headers={"location": "http://elsewhere"}),
    ],
)
def test_what_is_no_answer_is_a_server_error_at_once(answer, monkeypatch):
    server = BusyServer(answer, monkeypatch=monkeypatch)
    with server.client() as client, pytest.raises(ckn_scale.ServerError):
        client.search(b"image")
    assert server.asked == 1


def test_a_body_that_is_too_large_is_said_to_be(client, local_server):
    large, refused = bytes(24 * 2**20), "larger than 16 MiB: send a smaller image"
    with pytest.raises(ckn_scale.InputError, match=refused):
        client.search(large)

    async def ask() -> None:
        async with AsyncClient(local_server.url, key=KEY, retries=ONCE) as opened:
            await opened.search(large)

    with pytest.raises(ckn_scale.InputError, match=refused):
        asyncio.run(ask())


def test_nobody_there_is_said_in_a_sentence():
    url = f"http://127.0.0.1:{free_port()}"
    unreachable = pytest.raises(ckn_scale.ServerUnreachable, match=f"{url} cannot be reached: ")
    with Client(url, retries=ONCE) as client, unreachable:
        client.thumbnail(1)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("soon", None)]
)
def test_retry_after_is_seconds(text, seconds):
    assert parse_retry_after(text) == seconds


def test_retry_after_may_be_a_date():
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert parse_retry_after("Wed, 21 Oct 2065 07:28:00 GMT") > 1e9


def test_an_answer_of_a_later_release_is_read():
    hit = {"image_id": 1, "uri": "a", "score": 0.5, "columns": {}, "colour": "red", "copies": [4]}
    body = {"version": 1, "hits": [hit], "coverage": 1.0, "partial": False, "timings_ms": {}, "mood": "good"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    with Client("http://host", transport=transport) as client:
        answer = client.search(b"x")
    assert isinstance(answer, Answer)
    assert (answer[0].uri, answer.copies) == ("a", {1: (4,)})


def run_search(*arguments, env, **options):
    command = index_command("search", *arguments)
    return subprocess.run(command, env={**env, **options}, capture_output=True, text=True)


def test_the_command_asks_a_server_as_it_asks_a_run(local_server, photo_run, tmp_path, user_env):
    view, broken = tmp_path / "view.jpg", tmp_path / "broken.jpg"
    view.write_bytes(query_view("coffee"))
    broken.write_bytes(b"\xff\xd8\xff no more")
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    keyed = ("--api-key-file", key_file)
    here = run_search(photo_run, view, "-k", "3", "--json", env=user_env)
    there = run_search(local_server.url, view, "-k", "3", "--json", *keyed, env=user_env)
    assert (there.returncode, there.stderr) == (0, "")
    assert json.loads(there.stdout)["results"] == json.loads(here.stdout)["results"]
    refused = run_search(local_server.url, view, env=user_env)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("ckn-scale: this server needs a key")
    both = run_search(local_server.url, view, broken, "-k", "3", "--json", *keyed, env=user_env)
    assert both.returncode == 1
    assert json.loads(both.stdout)["results"][0] == json.loads(there.stdout)["results"][0]
    assert json.loads(both.stdout)["results"][1]["error"]["state"] in ("truncated", "corrupt")
    bad = run_search(local_server.url, broken, env=user_env, CKN_SCALE_API_KEY=KEY)
    assert bad.returncode == 1
    assert "truncated" in bad.stdout or "corrupt" in bad.stdout
