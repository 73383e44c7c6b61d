"""The same samples through Ray's metrics: every node exports those of its replicas, each under its own name.

Ray puts `ray_` before the names. With several ingress replicas this is the whole of them, while `/metrics`
is the replica's that was asked.
"""

from __future__ import annotations

from typing import Any

from ray.serve import metrics

from ckn_scale.serving.metrics import BUCKETS_S, METRICS, Metric, Sample


class RayExporter:
    def __init__(self) -> None:
        self._instruments = {metric.name: _make(metric) for metric in METRICS}

    def add(self, sample: Sample) -> None:
        instrument = self._instruments[sample.metric.name]
        tags = dict(zip(sample.metric.labels, sample.labels, strict=True))
        if sample.metric.kind == "counter":
            instrument.inc(sample.value, tags)
        elif sample.metric.kind == "gauge":
            instrument.set(sample.value, tags)
        else:
            instrument.observe(sample.value, tags)


def _make(metric: Metric) -> Any:
    if metric.kind == "counter":
        return metrics.Counter(metric.name, metric.help, metric.labels)
    if metric.kind == "gauge":
        return metrics.Gauge(metric.name, metric.help, metric.labels)
    return metrics.Histogram(metric.name, metric.help, list(BUCKETS_S), metric.labels)
