"""Start serving: on this machine with `serve_run`, on a cluster from a Serve config with `build_app`."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ckn_scale.errors import InputError, RunFailed, SettingsError
from ckn_scale.interrupts import wait_for_signal
from ckn_scale.search.versions import open_version
from ckn_scale.serving.keys import parse_keys
from ckn_scale.serving.settings import API_KEYS_VARIABLE, ServeSettings
from ckn_scale.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from ray import serve

logger = logging.getLogger(__name__)
APPLICATION = "ckn_scale"
THREADS_PER_ENCODER = 4  # more, and they wait for each other
# Serve exports its own metrics and looks at its deployments ten times a second: a sixth of a core when
# nobody asks.
SELDOM = {"RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000", "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25"}
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Serving:
    """A server that answers. `api_key` is the key that was made because none was given."""

    url: str
    version: int
    api_key: str | None


def serve_run(
    run_url: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shard_groups: int = 1,
    ray_address: str | None = None,
    api_keys: Sequence[str] = (),
    insecure: bool = False,
    block: bool = True,
    on_ready: Callable[[Serving], None] | None = None,
    **settings: Any,
) -> None:
    """Serve the current version of a run over HTTP until SIGINT or SIGTERM.

    Without `ray_address` a small Ray of its own is started, and ended on return; "auto" uses the
    cluster this machine belongs to. Other than loopback addresses need a key: one is made when none
    is given, unless `insecure`. With `block=False` it ends right after `on_ready` returns.
    Whatever the user can fix is refused before Ray starts. `settings` are fields of ServeSettings.
    """
    version, num_shards = check_run(run_url)
    check_port(host, port)
    local = {} if ray_address else local_resources()
    groups = min(shard_groups, max(1, num_shards))
    values = {"run_url": run_url, "shard_groups": groups, **local, **settings}
    checked, made_key = resolve_access(host, api_keys, values, insecure=insecure)
    with _running(checked, host, port, ray_address):
        if on_ready is not None:
            on_ready(Serving(make_url(host, port), version, made_key))
        if block:
            wait_for_signal()


def resolve_access(
    host: str, api_keys: Sequence[str], values: Mapping[str, Any], *, insecure: bool
) -> tuple[ServeSettings, str | None]:
    """Settings that say who is answered on `host`, and the key that was made because none was given."""
    keys, made_key, alone = parse_keys(api_keys), None, is_loopback(host)
    may_search = any("search" in key.scopes for key in keys)
    if not (may_search or insecure or alone):
        made_key = secrets.token_urlsafe(24)
        keys = (*keys, *parse_keys([f"{made_key} scope=search+metrics"]))
    access = {
        "require_keys": may_search or made_key is not None,
        "keys": keys,
        "allowed_hosts": (*LOOPBACK_NAMES, _bracket(host)) if alone else (),
        "open_metrics": alone and not keys,
    }
    return _check_settings({**access, **values}), made_key


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a Serve config file (`import_path: ckn_scale.serving.app:build_app`).

    `args` are fields of ServeSettings. Keys come from $CKN_SCALE_API_KEYS, so that no file holds them.
    """
    from ckn_scale.serving.deployments import bind_application

    keys = parse_keys(os.environ.get(API_KEYS_VARIABLE, "").split(","))
    settings = _check_settings({**args, "keys": keys})
    if settings.require_keys and not any("search" in key.scopes for key in keys):
        raise InputError(
            f"serving needs keys: set ${API_KEYS_VARIABLE} (comma-separated), or `require_keys: false` "
            "in the application's args where a gateway checks who asks"
        )
    return bind_application(settings)


def check_port(host: str, port: int) -> None:
    """InputError when nothing can listen there."""
    bind_socket(host, port).close()


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that may listen there; InputError when nothing can."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "the port is in use, choose another with --port" if in_use else error.strerror
        raise InputError(f"cannot listen on {host}:{port}: {reason}") from None
    except OverflowError:
        bound.close()
        raise InputError(f"port must be between 1 and 65535, got {port}") from None
    return bound


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_run(run_url: str) -> tuple[int, int]:
    """The number of the current version and of its index shards; InputError when there is none."""
    published = open_version(RunFolder.open(run_url))
    return published.number, len(published.manifest.shards)


def _check_settings(values: Mapping[str, Any]) -> ServeSettings:
    try:
        return ServeSettings(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"serving setting {where}: {first['msg']}, got {first['input']!r}") from None


def local_resources(num_cores: int | None = None) -> dict[str, Any]:
    """Defaults for one machine: its cores are shared, so Ray counts none, and the threads are what is set."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS
    cores = num_cores or allowed or 1
    replicas = -(-cores // THREADS_PER_ENCODER)
    return {
        "ingress_cpus": 0,
        "encoder_cpus": 0,
        "shard_cpus": 0,
        "encoder_replicas": replicas,
        "encoder_threads": -(-cores // replicas),
        "query_processes": max(2, -(-cores // replicas) // 2),
        "shard_threads": cores,
    }


@contextlib.contextmanager
def _running(settings: ServeSettings, host: str, port: int, ray_address: str | None) -> Iterator[None]:
    from ray import serve

    from ckn_scale.ray_cluster import FULL_PRIORITY, connect_ray
    from ckn_scale.serving import proxy

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Answers come before batch work, so the replicas keep the priority of this process; deployments
    # ask for no CPU here.
    environment = {**FULL_PRIORITY, **SELDOM, **proxy.ENVIRONMENT}
    with connect_ray(ray_address, num_cpus=1, environment=environment):
        if ray_address is not None:
            _check_application_is_new()
        location = "HeadOnly" if ray_address is None else "EveryNode"
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        options = {"host": host, "port": port}
        serve.start(proxy_location=location, http_options=options, logging_config=quiet)
        try:
            _deploy(settings, quiet)
            _check_answers(make_url(host, port))
            yield
        finally:
            # The application alone: on a cluster that is not ours others go on, and ours ends next.
            serve.delete(APPLICATION)


def _check_application_is_new() -> None:
    """Whoever serves on this cluster already keeps serving."""
    from ray import serve

    if APPLICATION in serve.status().applications:
        raise InputError(
            f"this cluster serves an application {APPLICATION!r} already; "
            f"`serve shutdown` ends it, a Serve config updates it"
        )


def _check_answers(url: str) -> None:
    """A cluster's Serve keeps the address it was first started with, whatever is asked for later."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(20):
        try:
            with direct.open(f"{url}/healthz", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RunFailed(
        f"the application runs, but nothing answers at {url}: Serve of this cluster listens elsewhere"
    )


def _deploy(settings: ServeSettings, logging_config: Mapping[str, Any]) -> None:
    from ray import serve

    from ckn_scale.serving.deployments import bind_application

    try:
        serve.run(bind_application(settings), name=APPLICATION, logging_config=dict(logging_config))
    except RuntimeError as error:
        raise RunFailed(f"serving {settings.run_url} failed: {_find_cause() or error}") from error


def _find_cause() -> str | None:
    """What the first deployment that could not start says: the last line of its traceback."""
    from ray import serve

    for name, deployment in serve.status().applications[APPLICATION].deployments.items():
        lines = [line for line in deployment.message.splitlines() if line.strip()]
        if deployment.status == "DEPLOY_FAILED" and lines:
            logger.info("%s: %s", name, deployment.message)
            return f"{name}: {lines[-1].removeprefix('ckn_scale.errors.')}"
    return None


def make_url(host: str, port: int) -> str:
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else _bracket(host)}:{port}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
