"""A real server: Ray Serve, HTTP, replicas that die."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running_server import KEY, as_body, query_view, wait_for

from ckn_scale.ray_cluster import short_temp_folder
from ckn_scale.search.engine import open_index


@pytest.fixture(scope="module", autouse=True)
def begun_headers(server) -> Iterator[socket.socket]:
    """A connection whose request never ends, opened before the other tests."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        yield connection


def test_a_view_finds_its_photograph_as_in_this_process(server, photo_run):
    index = open_index(photo_run)
    for photo in ("coffee", "astronaut"):
        body = server.search(query_view(photo), k=5).json()
        assert Path(body["hits"][0]["uri"]).stem == photo
        assert (body["partial"], body["coverage"]) == (False, 1.0)
        assert set(body["timings_ms"]) >= {"encode", "search", "total"}
        here = index.search(query_view(photo), k=5)
        assert [hit["image_id"] for hit in body["hits"]] == [hit.image_id for hit in here]
        assert [hit["score"] for hit in body["hits"]] == pytest.approx([hit.score for hit in here], abs=1e-3)
        assert body["found"] is here.found is True
        assert [hit["match"] for hit in body["hits"]] == [hit.match for hit in here]
        assert [hit["inliers"] for hit in body["hits"]] == pytest.approx([hit.inliers for hit in here], abs=1)
        assert body["hits"][0]["box"] == pytest.approx(here[0].box, abs=2)
    plain = server.search(query_view("coffee"), k=3, verify=False, filter="uri^=/").json()
    assert "found" not in plain
    assert plain["hits"][0].keys() == {"image_id", "uri", "score", "columns"}
    assert server.search(query_view("coffee"), k=3, filter="year>2000").status_code == 400


def test_every_route_answers_as_without_ray(server, local_server):
    view, other = query_view("coffee"), query_view("astronaut")
    match = {"image": as_body(view)["image"], "other": as_body(other)["image"]}
    pair = {"image_id": 1, "other_id": 2}
    batch = {"queries": [as_body(view, k=2), as_body(b"no image", k=2)]}
    for method, path, body in (
        ("POST", "/v1/search", as_body(view, k=4, expand=True, group_copies=True)),
        ("POST", "/v1/search", as_body(view, k=4, expand="discriminative")),
        ("POST", "/v1/search:batch", batch),
        ("POST", "/v1/match", match),
        ("POST", "/v1/match", pair),
        ("POST", "/v1/match", {"image": match["image"], "image_id": 3}),
        ("GET", "/v1/similar/1?k=3", None),
        ("GET", "/v1/images/1", None),
        ("GET", "/v1/images/1/thumbnail", None),
        ("GET", "/v1/examples?count=5", None),
        ("GET", "/v1/index", None),
        ("GET", "/v1/versions", None),
    ):
        answers = [one.client.request(method, path, json=body) for one in (server, local_server)]
        assert [answer.status_code for answer in answers] == [200, 200], (path, answers[0].text)
        assert without_times(answers[0]) == without_times(answers[1]), path
    image = {"content": view, "headers": {"content-type": "image/jpeg"}}
    previews = [one.client.post("/v1/preview", **image).content for one in (server, local_server)]
    assert previews[0] == previews[1]


def without_times(answer):
    """What an answer says, but for what differs each time."""
    if answer.headers["content-type"] != "application/json":
        return answer.content
    return drop(answer.json(), {"timings_ms", "request_id"})


def drop(value, names):
    if isinstance(value, dict):
        return {name: drop(one, names) for name, one in value.items() if name not in names}
    return [drop(one, names) for one in value] if isinstance(value, list) else value


def test_a_killed_shard_group_gives_partial_answers_until_it_is_back(server):
    image = query_view("coffee")

    def kill_and_search():
        victim = wait_for(lambda: server.find_replica("shards-1"), "the replica of shards-1")
        os.kill(victim, signal.SIGKILL)
        return server.search(image, k=20).json()

    # Serve may replace it within the shard timeout; then the answer is whole, and we kill again.
    body = wait_for(lambda: next((b for b in [kill_and_search()] if b["partial"]), None), "a partial answer")
    assert 0 < body["coverage"] < 1
    assert len(body["hits"]) == round(16 * body["coverage"])
    wait_for(lambda: not server.search(image, k=1).json()["partial"], "a whole answer again")
    assert server.client.get("/readyz").status_code == 200


def test_a_shard_group_that_hangs_is_left_out_until_it_answers(server):
    image = query_view("coffee")
    victim = wait_for(lambda: server.find_replica("shards-0"), "the replica of shards-0")
    os.kill(victim, signal.SIGSTOP)
    try:
        body = server.search(image, k=20).json()
        assert body["partial"]
        assert body["timings_ms"]["search"] < 3000
        again = server.search(image, k=20).json()
        assert again["partial"], "nobody waits for it a second time"
        strict = server.search(image, strict=True)
        assert (strict.status_code, strict.json()["error"]["code"]) == (503, "unavailable")
        assert server.client.get("/readyz").json()["not_ready"] == ["shards-0"]
    finally:
        os.kill(victim, signal.SIGCONT)
    wait_for(lambda: not server.search(image, k=1).json()["partial"], "a whole answer again")
    assert server.find_replica("shards-0") == victim


def test_a_killed_encoder_costs_only_those_who_ask_it_meanwhile(server):
    image = query_view("coffee")
    os.kill(wait_for(lambda: server.find_replica("encoder"), "the encoder's replica"), signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.search, image, k=1)
        assert server.client.get("/v1/images/0/thumbnail").status_code == 200
        assert server.client.get("/healthz").status_code == 200
        assert asked.result().status_code in (200, 503)
    wait_for(lambda: server.search(image, k=1).status_code == 200, "answers again")


def test_a_killed_ingress_is_back_by_itself(server):
    os.kill(wait_for(lambda: server.find_replica("ingress"), "the ingress's replica"), signal.SIGKILL)
    wait_for(lambda: server.client.get("/healthz").status_code == 200, "the server answers again")
    assert server.search(query_view("coffee"), k=1).status_code == 200


def test_the_key_is_not_kept_in_the_servers_files(server):
    logs = [log for log in Path(short_temp_folder()).glob("ckn-*/ray/session_*/logs/**/*") if log.is_file()]
    assert logs
    for log in logs:
        assert KEY.encode() not in log.read_bytes()


def test_headers_that_do_not_end_are_not_waited_for(begun_headers):
    begun_headers.settimeout(60)
    assert begun_headers.recv(1) == b"", "Serve's proxy has our deadline too"
