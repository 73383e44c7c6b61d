"""Clients that cost much or go away, and more of them than can be served: the others are answered."""

from __future__ import annotations

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

from hostile_images import slow_image
from running_server import KEY, as_body, local_server_of, make_client, query_view


def test_images_that_take_for_ever_are_ended_and_keep_nobody_waiting(photo_run):
    slow, good = slow_image(), query_view("coffee")
    with (
        local_server_of(photo_run, query_processes=1, query_timeout_s=2.0) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        assert server.search(good, k=1).status_code == 200
        hostile = [pool.submit(server.search, slow) for _ in range(3)]
        answered = [server.search(good, k=1).status_code for _ in range(3)]
        assert answered == [200] * 3
        assert not all(one.done() for one in hostile), "they were answered meanwhile"
        for one in hostile:
            assert one.result().status_code == 422
            assert one.result().json()["error"]["state"] == "timeout"


def test_more_than_can_be_served_in_time_are_refused_and_the_others_answered(photo_run):
    image = query_view("coffee")
    with local_server_of(photo_run, max_wait_s=0.01) as server:

        def ask_often(_):
            with make_client(server.url) as client:
                return [client.post("/v1/search", json=as_body(image, k=1, verify=False)) for _ in range(6)]

        with ThreadPoolExecutor(8) as pool:
            answers = [one for some in pool.map(ask_often, range(8)) for one in some]
        refused = [one for one in answers if one.status_code == 429]
        assert {one.status_code for one in answers} == {200, 429}
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert any("would be answered" in one.json()["error"]["message"] for one in refused)
        assert server.search(image, k=1).status_code == 200


def connect(server, length: int) -> socket.socket:
    """A connection that has sent the head of a search whose body has so many bytes."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    head = f"POST /v1/search HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), 60)
    connection.sendall(head.encode())
    return connection


def test_who_goes_away_in_the_middle_hurts_nobody(local_server):
    body = json.dumps(as_body(query_view("coffee"))).encode()
    for sent in (body[:100], body) * 3:
        with contextlib.closing(connect(local_server, len(body))) as one:
            one.sendall(sent)
    assert local_server.search(query_view("coffee"), k=1).status_code == 200


def test_a_gigabyte_is_refused_before_it_is_sent(local_server):
    with contextlib.closing(connect(local_server, 2**30)) as one:
        assert one.recv(64).startswith(b"HTTP/1.1 413 ")
