"""How the ingress sees deployments of several replicas. No Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ckn_scale.serving.deployments import DeploymentClient
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
    handle = DeploymentClient(fake_deployment(replicas), len(replicas))
    assert asyncio.run(handle.prepare(2)) is ready


def test_replicas_seen_earlier_count():
    replicas = {"a": {2}, "b": set()}
    handle = DeploymentClient(fake_deployment(replicas), 2)
    assert asyncio.run(handle.prepare(2)) is False
    replicas["b"].add(2)
    assert asyncio.run(handle.prepare(2)) is True


def test_a_method_of_the_replicas_is_awaited_by_its_name():
    async def score(*arguments):
        return arguments

    client = DeploymentClient(SimpleNamespace(score=SimpleNamespace(remote=score)), 1)
    assert asyncio.run(client.score(3, "points", [7])) == (3, "points", [7])
