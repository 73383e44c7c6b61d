"""Who looks at every request at its end: metrics, and the access log where one is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import FastAPI, Response

from ckn_scale.serving.access_log import AccessLog
from ckn_scale.serving.descriptions import errors
from ckn_scale.serving.gate import METRICS_PATH, RequestGate
from ckn_scale.serving.metrics import (
    CONTENT_TYPE,
    GROUP_IMAGES,
    GROUP_VERSION,
    IN_FLIGHT,
    SEARCHES,
    WAIT,
    Exporter,
    RequestMetrics,
    Sample,
)
from ckn_scale.serving.queue import SearchQueue
from ckn_scale.serving.router import SearchRouter


def watch_requests(
    app: FastAPI,
    gate: RequestGate,
    router: SearchRouter,
    queue: SearchQueue,
    exporters: Sequence[Exporter] = (),
) -> None:
    """Have the gate's requests counted and logged, and `/metrics` answered."""
    metrics = RequestMetrics(lambda: read_state(router, gate, queue), exporters)
    gate.observers.append(metrics.observe)
    if router.settings.access_log is not None:
        gate.observers.append(AccessLog(router.settings.access_log).write)

    described = {200: {"content": {CONTENT_TYPE: {}}}, **errors(401)}

    @app.get(METRICS_PATH, response_class=Response, responses=described)
    async def read_metrics() -> Response:
        """For Prometheus; with a key that has the scope metrics."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def read_state(router: SearchRouter, gate: RequestGate, queue: SearchQueue) -> Iterator[Sample]:
    """The gauges. A group answers from the router's version or not at all, so that one is each group's."""
    version = router.version
    for group, rows in enumerate(version.group_rows):
        yield Sample(GROUP_VERSION, version.number, (str(group),))
        yield Sample(GROUP_IMAGES, rows, (str(group),))
    yield Sample(IN_FLIGHT, gate.in_flight)
    yield Sample(SEARCHES, queue.under_way)
    yield Sample(WAIT, queue.estimate_wait_s())
