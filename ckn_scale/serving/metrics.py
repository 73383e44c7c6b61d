"""What is counted of requests, for Prometheus: `GET /metrics`, and Ray's own exporter on a cluster.

`METRICS` is the whole list; README and the dashboard in cluster/ name them as they are called here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ckn_scale.serving.request_record import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """What to add to a counter, to set a gauge to, or to observe in a histogram."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


REQUESTS = Metric("ckn_scale_requests_total", "counter", "Requests answered", ("route", "method", "status"))
REQUEST_SECONDS = Metric(
    "ckn_scale_request_seconds", "histogram", "From a request's first byte to its answer's last", ("route",)
)
PHASE_SECONDS = Metric("ckn_scale_phase_seconds", "histogram", "Phases of an answer", ("phase",))
REJECTED = Metric("ckn_scale_rejected_total", "counter", "Requests answered with an error", ("reason",))
ANSWERS = Metric("ckn_scale_answers_total", "counter", "Answers from the index, by version", ("version",))
PARTIAL = Metric("ckn_scale_partial_answers_total", "counter", "Answers that lack some part of the index")
FOUND = Metric(
    "ckn_scale_verified_answers_total", "counter", "Verified answers, by their verdict", ("found",)
)
LEFT_OUT = Metric(
    "ckn_scale_group_left_out_total", "counter", "Times a shard group was left out of an answer", ("group",)
)
GROUP_VERSION = Metric(
    "ckn_scale_group_version", "gauge", "The version that a shard group answers from", ("group",)
)
GROUP_IMAGES = Metric("ckn_scale_group_images", "gauge", "Images that a shard group holds", ("group",))
IN_FLIGHT = Metric("ckn_scale_requests_in_flight", "gauge", "Requests under way in this ingress replica")
SEARCHES = Metric(
    "ckn_scale_searches_in_flight", "gauge", "Searches that run or wait in this ingress replica"
)
WAIT = Metric(
    "ckn_scale_queue_wait_seconds",
    "gauge",
    "In what time one more search would be answered; beyond max_wait_s it is refused",
)
METRICS = (
    *(REQUESTS, REQUEST_SECONDS, PHASE_SECONDS, REJECTED, ANSWERS, PARTIAL, FOUND, LEFT_OUT),
    *(GROUP_VERSION, GROUP_IMAGES, IN_FLIGHT, SEARCHES, WAIT),
)


class Exporter(Protocol):
    """Where samples go."""

    def add(self, sample: Sample) -> None: ...


class RequestMetrics:
    """Turns records of requests into samples; `read_state` gives those of the moment (gauges)."""

    def __init__(
        self, read_state: Callable[[], Iterable[Sample]], exporters: Sequence[Exporter] = ()
    ) -> None:
        self._read_state = read_state
        self._own = PrometheusExporter()
        self._exporters: tuple[Exporter, ...] = (self._own, *exporters)

    def observe(self, record: RequestRecord) -> None:
        for sample in (*list_samples(record), *self._read_state()):
            for exporter in self._exporters:
                exporter.add(sample)

    def render(self) -> bytes:
        """As Prometheus reads it."""
        for sample in self._read_state():
            self._own.add(sample)
        return self._own.render()


def list_samples(record: RequestRecord) -> Iterator[Sample]:
    status = str(record.status or "disconnected")
    yield Sample(REQUESTS, 1, (record.route, record.method, status))
    yield Sample(REQUEST_SECONDS, record.seconds, (record.route,))
    if record.code is not None:
        yield Sample(REJECTED, 1, (record.code,))
    if record.version is not None:
        yield Sample(ANSWERS, 1, (str(record.version),))
    for phase, spent_ms in record.timings_ms.items():
        yield Sample(PHASE_SECONDS, spent_ms / 1e3, (phase,))
    if record.partial:
        yield Sample(PARTIAL, 1)
    if record.found is not None:
        yield Sample(FOUND, 1, ("yes" if record.found else "no",))
    for group in record.groups_left_out:
        yield Sample(LEFT_OUT, 1, (str(group),))


class PrometheusExporter:
    """The samples of this process, with its memory and open files."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._instruments = {metric.name: self._make(metric) for metric in METRICS}

    def add(self, sample: Sample) -> None:
        instrument = self._instruments[sample.metric.name]
        child = instrument.labels(*sample.labels) if sample.labels else instrument
        if sample.metric.kind == "counter":
            child.inc(sample.value)
        elif sample.metric.kind == "gauge":
            child.set(sample.value)
        else:
            child.observe(sample.value)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _make(self, metric: Metric) -> Any:
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self._registry)
        if metric.kind == "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=self._registry)
        return Histogram(metric.name, metric.help, metric.labels, buckets=BUCKETS_S, registry=self._registry)
