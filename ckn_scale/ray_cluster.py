"""Ray for batch work and for serving: a small cluster of our own that ends with us, or one that was named."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import ray
from ray._private import ray_constants, services, utils

from ckn_scale.interrupts import interrupts_deferred

OBJECT_STORE_BYTES = 128 * 2**20  # reports, queries and hits are small; nothing large travels
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
FULL_PRIORITY = {"RAY_worker_niceness": "0"}  # Ray's workers would yield to everything else


@contextlib.contextmanager
def connect_ray(
    address: str | None, *, num_cpus: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Ray for the time of the block: our own local cluster for None, else the named one ("auto").

    `num_cpus` and `environment` are for our own: each CPU starts an idle worker process.
    """
    if address is not None:
        with _replaced(utils, "set_sigterm_handler", _leave_handler):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # An own folder, so that nobody else's ray.init() finds this cluster and no one's `ray` joins it. Ray
    # opens its own to everybody: this one around it is the user's alone.
    folder = tempfile.mkdtemp(prefix="ckn-", dir=short_temp_folder())
    _set_token()
    with _environment({**NO_USAGE_STATS, **(environment or {})}):
        try:
            with interrupts_deferred():
                _start_local(os.path.join(folder, "ray"), num_cpus)
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _start_local(folder: str, num_cpus: int) -> None:
    """Ray of our own: ended by us alone, on loopback alone.

    Its processes get a session of their own, or what is sent to our process group would end them before we
    do, and a driver that has lost its raylet ends at once. Where Ray knows of no other nodes (macOS,
    Windows) it listens on loopback; on Linux it replaces a loopback address that it is given by one that
    others reach, and its servers listen on all interfaces.
    """
    start = functools.partial(services.ConsolePopen, start_new_session=True)
    with (
        _replaced(services, "ConsolePopen", start),
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False),
        _replaced(utils, "set_sigterm_handler", _leave_handler),
    ):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """For what Ray has no option for."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _leave_handler(handler: object) -> None:
    """SIGTERM is for whoever called us: Ray's own handler would exit with 1 from wherever it is met."""


def _set_token() -> None:
    """A token for this process and its children, unless the user chose; Ray would write one into HOME.

    It stays set: Ray remembers the first token it saw for as long as the process lives.
    """
    if not any(name in os.environ for name in AUTH_VARIABLES):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def short_temp_folder() -> str:
    """Ray's sockets lie below this folder, and a socket's path has at most 107 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 28 else "/tmp"
