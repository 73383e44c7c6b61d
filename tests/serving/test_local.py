"""`serve --local`: the server in one process, without Ray."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from photo_runs import index_command
from running_server import as_body, free_port, local_server_of, query_view

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
            assert process.stdout.readline().startswith(
                f"serving version 1 of {photo_run} at http://127.0.0.1:"
            )
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
