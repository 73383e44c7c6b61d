"""The server in one process, without Ray: the same API, router and replicas, called directly.

For a laptop, a small machine or a test. Replicas that die, hang or run on other machines need Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn

from ckn_scale.errors import RunFailed
from ckn_scale.interrupts import wait_for_signal
from ckn_scale.search.versions import latest_version_number
from ckn_scale.serving.api import make_api
from ckn_scale.serving.app import Serving, bind_socket, check_run, local_resources, make_url, resolve_access
from ckn_scale.serving.proxy import DeadlineProtocol
from ckn_scale.serving.replicas import EncoderReplica, ShardReplica
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version, follow_versions
from ckn_scale.storage.run_folder import RunFolder

GRACE_S = 5  # for requests under way when the server ends
KEEP_ALIVE_S = 90  # as Ray Serve's: uvicorn's 5 s end just when who was told to wait for 5 s asks again
GROUP_TIMEOUT_S = 30.0  # a group in this process does not die: it has much to do


def serve_local(
    run_url: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shard_groups: int = 1,
    api_keys: Sequence[str] = (),
    insecure: bool = False,
    on_ready: Callable[[Serving], None] | None = None,
    **settings: Any,
) -> None:
    """Serve the current version of a run from this process until SIGINT or SIGTERM.

    As `serve_run` otherwise; port 0 takes a free one.
    """
    version, num_shards = check_run(run_url)
    groups = min(shard_groups, max(1, num_shards))
    resources = {**local_resources(), "shard_timeout_s": GROUP_TIMEOUT_S}
    values = {"run_url": run_url, "shard_groups": groups, **resources, **settings}
    if values["encoder_replicas"] > 1:  # which are processes elsewhere: here threads do as much
        values["encoder_threads"] *= values["encoder_replicas"]
        values["encoder_replicas"] = 1
    checked, made_key = resolve_access(host, api_keys, values, insecure=insecure)
    with answering(checked, host, port) as url:
        if on_ready is not None:
            on_ready(Serving(url, version, made_key))
        wait_for_signal()


@contextlib.contextmanager
def answering(settings: ServeSettings, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """A server in a thread of this process, at the URL that is given; ended on leaving."""
    with bind_socket(host, port) as listening:
        url = make_url(host, listening.getsockname()[1])
        run = RunFolder.open(settings.run_url)
        pool = ThreadPoolExecutor(settings.encoder_threads, "compute")
        encoder = EncoderReplica(settings, pool)
        try:
            groups = [ShardReplica(settings, group, pool) for group in range(settings.shard_groups)]
            version = describe_version(run, latest_version_number(run), settings.shard_groups)
            router = SearchRouter(settings, version, encoder, groups)
            server = uvicorn.Server(_configure(router))
            thread = threading.Thread(
                target=lambda: asyncio.run(_answer(server, listening, run, router)), name="http", daemon=True
            )
            thread.start()
            try:
                _wait_until_it_answers(server, thread, url)
                yield url
            finally:
                server.should_exit = True
                thread.join()
        finally:
            encoder.close()


def _configure(router: SearchRouter) -> uvicorn.Config:
    return uvicorn.Config(
        make_api(router),
        http=DeadlineProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # the API logs what goes wrong in it
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


async def _answer(server: uvicorn.Server, listening: Any, run: RunFolder, router: SearchRouter) -> None:
    following = asyncio.create_task(follow_versions(run, router))
    try:
        await server.serve([listening])
    finally:
        following.cancel()


def _wait_until_it_answers(server: uvicorn.Server, thread: threading.Thread, url: str) -> None:
    while not server.started:
        thread.join(0.01)
        if not thread.is_alive():
            raise RunFailed(f"the server at {url} ended before it answered; its log says why")
