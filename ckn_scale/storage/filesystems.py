"""From a URL to an fsspec filesystem that tells the truth: no listing caches, no retries of its own.

One filesystem per process and address: fsspec would keep one per thread, and an async one is
broken after a fork.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec

from ckn_scale.errors import InputError, MissingDependency

_LOCAL_PROTOCOLS = ("file", "local")
_ENVIRONMENT = (  # what a store's client reads when it is made
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
)
_opened: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


def split_protocol(url: str) -> tuple[str, str]:
    """`s3://bucket/key` → ("s3", "bucket/key"); a plain or file:// path → ("file", path)."""
    protocol, separator, path = url.partition("://")
    if not separator:
        return "file", url
    if "::" in url:
        raise InputError(f"chained stores are not supported, got {url}")
    if protocol in _LOCAL_PROTOCOLS:
        return "file", unquote(path, errors="surrogateescape")
    return protocol, path


def is_local_url(url: str) -> bool:
    return split_protocol(url)[0] == "file"


def normalise_url(url: str) -> str:
    """An absolute path for local files, else the URL without a slash at its end."""
    protocol, path = split_protocol(str(url))
    if not path:
        raise InputError(f"an empty path, got {url!r}")
    if protocol == "file":
        return local_url(os.path.abspath(Path(path).expanduser()))
    return f"{protocol}://{path.rstrip('/')}"


def local_url(path: str) -> str:
    """The path itself, or a file:// URL where its bytes are no UTF-8: records and tables hold text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"file://{quote(os.fsencode(path))}"
    return path


def open_filesystem(url: str) -> Any:
    """The filesystem of `url`, shared by the threads of this process."""
    protocol, _ = split_protocol(url)
    key = (protocol, os.getpid(), *(os.environ.get(name) for name in _ENVIRONMENT))
    with _lock:
        if key not in _opened:
            _opened[key] = _make_filesystem(protocol, url)
        return _opened[key]


def _make_filesystem(protocol: str, url: str) -> Any:
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        options |= _s3_options()
    try:
        filesystem = fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise MissingDependency(f"{url} needs a package that is missing: {error}") from error
    except ValueError as error:
        raise InputError(f"{url}: {error}") from error
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1  # ours count and wait for all stores
    return filesystem


def _s3_options() -> dict[str, Any]:
    retries = {"total_max_attempts": 1, "mode": "standard"}
    config = {"retries": retries, "connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 64}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {"config_kwargs": config, "endpoint_url": endpoint or None}
