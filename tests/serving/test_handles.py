"""How the ingress sees deployments of several replicas. No Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ckn_scale.serving.deployments import GroupHandle
from ckn_scale.serving.versions import Readiness


def fake_deployment(replicas):
    """A handle whose calls go round the replicas: name → the versions it holds."""
    names = list(replicas)
    calls = []

    async def report(version):
        name = names[len(calls) % len(names)]
        calls.append(name)
        return Readiness(name, version in replicas[name])

    return SimpleNamespace(report=SimpleNamespace(remote=report))


@pytest.mark.parametrize(
    ("replicas", "ready"),
    [
        ({"a": {1, 2}}, True),
        ({"a": {1}}, False),
        ({"a": {2}, "b": {1}}, False),
        ({"a": {2}, "b": {1, 2}}, True),
    ],
)
def test_a_deployment_is_ready_when_every_replica_holds_the_version(replicas, ready):
    handle = GroupHandle(fake_deployment(replicas), len(replicas))
    assert asyncio.run(handle.prepare(2)) is ready


def test_replicas_seen_earlier_count():
    replicas = {"a": {2}, "b": set()}
    handle = GroupHandle(fake_deployment(replicas), 2)
    assert asyncio.run(handle.prepare(2)) is False
    replicas["b"].add(2)
    assert asyncio.run(handle.prepare(2)) is True
