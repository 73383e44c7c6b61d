"""What is written down of requests: metrics and the access log. No Ray."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_api import IMAGE, with_server

from ckn_scale.errors import InputError
from ckn_scale.serving.access_log import AccessLog
from ckn_scale.serving.keys import hash_key, parse_keys
from ckn_scale.serving.metrics import METRICS

DASHBOARD = Path(__file__).parents[2] / "cluster" / "grafana.json"


async def read_metrics(server):
    answer = await server.client.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_happened():
    async def check(server):
        assert (await server.search()).status_code == 200
        server.groups[1].failure = RuntimeError("dead")
        assert (await server.search()).json()["partial"]
        assert (await server.search(base64.b64encode(b"junk").decode())).status_code == 422
        assert (await server.client.get("/nothing/secret")).status_code == 404
        found = await read_metrics(server)
        route = ("route", "/v1/search")
        assert found["ckn_scale_requests_total", ("method", "POST"), route, ("status", "200")] == 2
        assert found["ckn_scale_requests_total", ("method", "POST"), route, ("status", "422")] == 1
        assert found["ckn_scale_request_seconds_count", route] == 3
        assert found["ckn_scale_rejected_total", ("reason", "image_rejected")] == 1
        assert found["ckn_scale_rejected_total", ("reason", "not_found")] == 1
        assert found["ckn_scale_phase_seconds_count", ("phase", "encode")] == 2
        assert found["ckn_scale_phase_seconds_count", ("phase", "search")] == 2
        assert found["ckn_scale_answers_total", ("version", "1")] == 2
        assert found[("ckn_scale_partial_answers_total",)] == 1
        assert found["ckn_scale_group_left_out_total", ("group", "1")] == 1
        assert found["ckn_scale_group_version", ("group", "1")] == 1
        assert found["ckn_scale_group_images", ("group", "0")] == 30
        assert found[("ckn_scale_requests_in_flight",)] == 1  # this one
        assert "secret" not in str(found.keys())

    with_server(check, open_metrics=True)


def test_metrics_need_a_key_of_their_own():
    async def check(server):
        assert (await server.client.get("/metrics")).status_code == 401
        answer = await server.client.get("/metrics", headers={"authorization": "Bearer m"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "process_open_fds" in answer.text

    with_server(check, require_keys=True, keys=parse_keys(["s", "m scope=metrics"]))


def test_the_dashboard_shows_every_metric_and_no_other():
    board = json.loads(DASHBOARD.read_text())
    texts = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    named = {name.removesuffix("_bucket") for name in re.findall(r"\$\{prefix\}(\w+)", texts)}
    assert named == {metric.name for metric in METRICS}
    labels = {label for metric in METRICS for label in metric.labels}
    grouped = re.findall(r"by \(([^)]+)\)", texts)
    assert {label.strip() for group in grouped for label in group.split(",")} <= labels | {"le"}


def test_the_access_log_has_a_line_per_request_and_never_the_image_or_the_key(tmp_path):
    path = tmp_path / "access.jsonl"

    async def check(server):
        headers = {"authorization": "Bearer my secret", "x-request-id": "ours-1"}
        assert (await server.search(headers=headers, k=2)).status_code == 200
        assert (await server.search()).status_code == 401
        await server.client.get("/v1/images/0/thumbnail?filter=private", headers=headers)
        path.rename(tmp_path / "access.jsonl.1")  # as logrotate does
        await server.client.get("/healthz")

    with_server(check, access_log=str(path), require_keys=True, keys=parse_keys(["my secret"]))
    text = (tmp_path / "access.jsonl.1").read_text()
    answered, refused, thumbnail = map(json.loads, text.splitlines())
    assert answered["request_id"] == "ours-1"
    assert answered["key"] == hash_key("my secret")[:8]
    assert (answered["status"], answered["version"], answered["route"]) == (200, 1, "/v1/search")
    assert answered["timings_ms"].keys() >= {"encode", "search"}
    assert (answered["partial"], answered["coverage"]) == (False, 1.0)
    assert answered["bytes_in"] > len(IMAGE)
    assert (refused["status"], refused["code"]) == (401, "unauthorized")
    assert "key" not in refused
    assert (thumbnail["path"], thumbnail["bytes_out"]) == ("/v1/images/0/thumbnail", 4)
    assert not any(word in text for word in ("my secret", IMAGE, "private", hash_key("my secret")))
    assert json.loads(path.read_text())["path"] == "/healthz"


def test_a_client_that_went_away_is_on_record(tmp_path):
    path = tmp_path / "access.jsonl"

    async def check(server):
        server.encoder.release.clear()
        search = asyncio.create_task(server.search())
        while not server.encoder.versions:
            await asyncio.sleep(0)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    with_server(check, access_log=str(path))
    assert json.loads(path.read_text())["status"] == 0


def test_an_access_log_that_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(InputError, match=r"cannot write the access log .*: No such file or directory"):
        AccessLog(str(tmp_path / "nowhere" / "access.jsonl"))


def test_the_log_goes_to_stderr_where_it_is_asked_for(capfd):
    with_server(lambda server: server.client.get("/healthz"), access_log="-")
    assert json.loads(capfd.readouterr().err)["route"] == "/healthz"


def test_an_observer_that_fails_costs_no_answer(caplog):
    async def check(server):
        gate = server.client._transport.app
        gate.observers.insert(0, lambda record: 1 / 0)
        assert (await server.search()).status_code == 200
        assert "ZeroDivisionError" in caplog.text
        assert ("ckn_scale_answers_total", ("version", "1")) in await read_metrics(server)

    with_server(check, open_metrics=True)
