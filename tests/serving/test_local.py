"""`serve --local`: the server in one process, without Ray."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from photo_runs import index_command
from PIL import Image
from running_server import as_body, free_port, local_server_of, query_view

from ckn_scale.demo import read_photo
from ckn_scale.errors import InputError
from ckn_scale.search.engine import open_index
from ckn_scale.serving.local import serve_local


def test_answers_are_those_of_this_process_to_the_last_bit(local_server, photo_run):
    index = open_index(photo_run)
    for photo in ("coffee", "astronaut"):
        body = local_server.search(query_view(photo), k=5).json()
        here = index.search(query_view(photo), k=5)
        assert [hit["image_id"] for hit in body["hits"]] == [hit.image_id for hit in here]
        assert [hit["score"] for hit in body["hits"]] == [hit.score for hit in here]
        assert [hit["inliers"] for hit in body["hits"]] == [hit.inliers for hit in here]
        assert body["found"] is here.found is True
        assert (body["partial"], body["coverage"]) == (False, 1.0)


def test_without_the_key_nothing_is_told(local_server):
    with httpx.Client(base_url=local_server.url) as stranger:
        assert stranger.post("/v1/search", json=as_body(query_view("coffee"))).status_code == 401
        assert stranger.get("/readyz").json()["ready"]
        assert stranger.get("/", headers={"host": "evil.example"}).status_code == 421


def test_a_server_that_ends_frees_its_port_and_its_processes(photo_run):
    with local_server_of(photo_run, query_processes=1) as one:
        port = int(one.url.rpartition(":")[2])
        assert one.client.get("/healthz").status_code == 200
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_a_port_in_use_is_refused(photo_run):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
            serve_local(str(photo_run), port=port)


def test_the_command_serves_until_a_signal_without_ray(photo_run, user_env):
    port = free_port()
    command = index_command("serve", photo_run, "--local", "--port", str(port))
    with subprocess.Popen(command, env=user_env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert f" of {photo_run} at http://127.0.0.1:{port} " in process.stdout.readline()
            body = as_body(query_view("coffee"), k=1)
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/search", json=body, timeout=60).json()
            assert Path(answer["hits"][0]["uri"]).stem == "coffee"
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "torch" in maps
            assert "/ray/" not in maps
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_local_and_a_cluster_exclude_each_other(photo_run, user_env):
    command = index_command("serve", photo_run, "--local", "--ray", "auto")
    done = subprocess.run(command, env=user_env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "give one of them" in done.stderr


def assert_rejected(answer: httpx.Response, state: str) -> None:
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["state"]) == ("image_rejected", state)
    assert error["reason"] in error["message"]


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def test_a_box_searches_for_a_part(local_server):
    cat, cup = read_photo("chelsea")[:300, :400], read_photo("coffee")[:300, :400]
    both = png(np.concatenate([cat, cup], axis=1))
    for box, photo in (([0, 0, 400, 300], "chelsea"), ([400, 0, 800, 300], "coffee")):
        assert Path(local_server.search(both, k=1, box=box).json()["hits"][0]["uri"]).stem == photo


def test_thumbnails_are_jpegs(local_server):
    hit = local_server.search(query_view("rocket"), k=1).json()["hits"][0]
    answer = local_server.client.get(f"/v1/images/{hit['image_id']}/thumbnail")
    assert answer.headers["content-type"] == "image/jpeg"
    assert max(Image.open(io.BytesIO(answer.content)).size) <= 96
    assert local_server.client.get("/v1/images/123456/thumbnail").json()["error"]["code"] == "not_found"


def test_bad_images_are_told_their_state_and_reason(local_server):
    photo = query_view("coins")
    assert_rejected(local_server.search(b""), "empty")
    assert_rejected(local_server.search(b"%PDF-1.7 no image at all"), "unsupported")
    assert_rejected(local_server.search(photo[: len(photo) // 2]), "truncated")
    assert_rejected(local_server.search(png(np.full((200, 200, 3), 90, np.uint8))), "no_keypoints")
    assert local_server.search(photo, box=[5000, 5000, 6000, 6000]).status_code in (400, 422)
    assert local_server.search(photo).status_code == 200


def test_a_body_beyond_16_mib_is_refused_declared_or_streamed(local_server):
    headers = {"content-type": "application/json"}

    def stream():
        for _ in range(20):
            yield b"x" * 2**20

    for content in (b"x" * (17 * 2**20), stream()):
        answer = local_server.client.post("/v1/search", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
    assert local_server.client.get("/healthz").status_code == 200


def test_too_many_at_once_are_asked_to_come_back(local_server):
    image = query_view("coffee")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: local_server.search(image, k=1), range(16)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "too_busy"
