"""Files that the server fetches itself: originals of indexed images, and URIs that a client names.

Closed unless the operator lists prefixes, and then: a URI lies below one of them as it is written and, on a
disk, where it really is; no `file:` and no chained protocols; a redirect leads to a listed prefix again; a
name that resolves to a private address is refused, unless the prefix names that address or localhost itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from ckn_scale.core.image_files import open_image_file
from ckn_scale.errors import CknScaleError, ImageRejected
from ckn_scale.serving.limits import ApiError
from ckn_scale.storage.http_images import HttpImages, HttpPolicy, is_http
from ckn_scale.storage.image_sources import read_image, split_container
from ckn_scale.storage.input_files import stat_input

MAX_BYTES = 64 * 2**20
READS_AT_ONCE = 4
DEADLINE_S = 30.0
_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_LOCAL = ("file", "local", "memory")


@dataclass(frozen=True)
class OriginalFile:
    data: bytes
    media_type: str


class Originals:
    """What may be fetched, and its bytes."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self.prefixes = [prefix.rstrip("/") + "/" for prefix in prefixes]
        self._threads = ThreadPoolExecutor(READS_AT_ONCE, "originals")

    def allows(self, uri: str) -> bool:
        """Whether the URI lies below a listed prefix; where it is a local file, also behind its links."""
        if "::" in uri or "\0" in uri or any(part in (".", "..") for part in _parts(uri)):
            return False
        protocol = _PROTOCOL.match(uri)
        if protocol is None:
            return self._allows_file(split_container(uri))
        if protocol[1].lower() in _LOCAL or (is_http(uri) and split_container(uri) != uri):
            return False  # ranges of containers on the web are read by a client that follows any redirect
        return any(uri.startswith(prefix) for prefix in self.prefixes if _PROTOCOL.match(prefix))

    def _allows_file(self, path: str) -> bool:
        roots = [prefix for prefix in self.prefixes if os.path.isabs(prefix)]
        real = os.path.realpath(path)
        return any(
            path.startswith(root) and real.startswith(os.path.realpath(root).rstrip("/") + "/")
            for root in roots
        )

    async def read(self, uri: str) -> OriginalFile:
        """ApiError 403 when it may not be fetched, 404 when there is no image, 503 when out of reach."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._threads, self._read, uri), DEADLINE_S)
        except ImageRejected as rejected:
            if rejected.state == "unreachable":
                raise _unreadable() from None
            raise ApiError(404, "not_found", f"there is no image at its URI ({rejected.state})") from None
        except (CknScaleError, OSError, asyncio.TimeoutError):
            raise _unreadable() from None

    def _read(self, uri: str) -> OriginalFile:
        if not self.allows(uri):
            raise ApiError(403, "forbidden", "this server does not give out files from there")
        data = self._read_web(uri) if is_http(uri) else _read_store(uri)
        if len(data) > MAX_BYTES:
            raise _too_large()
        with open_image_file(data) as file:
            return OriginalFile(data, file.get_format_mimetype() or "application/octet-stream")

    def _read_web(self, url: str) -> bytes:
        policy = HttpPolicy(tries=1, deadline_s=DEADLINE_S - 5, max_bytes=MAX_BYTES)
        with HttpImages(policy, check_url=self._check_url, resolver=PublicResolver) as web:
            return web.read(url)

    def _check_url(self, url: str) -> None:
        """Of every redirect, too."""
        if not self.allows(url):
            raise ImageRejected("missing", "it redirects to where nothing may be fetched from")


class PublicResolver(AbstractResolver):
    """Names of public addresses only; localhost is what the operator wrote."""

    def __init__(self) -> None:
        self._names = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)  # type: ignore[arg-type]
        return found if host == "localhost" else [one for one in found if is_public(one["host"])]

    async def close(self) -> None:
        await self._names.close()


def is_public(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def _parts(uri: str) -> list[str]:
    """The segments of its path, as a server may read them."""
    path = urlsplit(uri).path if is_http(uri) else uri
    return re.split(r"[/\\]", unquote(unquote(path)) if is_http(uri) else path)


def _read_store(uri: str) -> bytes:
    file = stat_input(split_container(uri))
    if file is not None and split_container(uri) == uri and file.size_bytes > MAX_BYTES:
        raise _too_large()
    return read_image(uri)


def _too_large() -> ApiError:
    return ApiError(404, "not_found", f"its file has more than {MAX_BYTES >> 20} MiB, which is not given out")


def _unreadable() -> ApiError:
    message = "its file cannot be read at the moment: try again in a few seconds"
    return ApiError(503, "unavailable", message).with_headers({"retry-after": "5"})
