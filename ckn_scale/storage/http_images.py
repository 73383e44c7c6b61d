"""Images behind http(s) URLs: fetched beside each other, few at a time from one host, within limits.

Hosts of strangers come and go, so what a URL does is the row's business and never fails the shard:
404 and 410 are `missing`; whatever else keeps its bytes from us is `unreachable` after its tries.
aiohttp is what fsspec and s3fs speak HTTP with; used directly, because a limit on the whole fetch
(name lookup, redirects, headers, a body that drips) and on its size cannot be had through fsspec.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver
from fsspec.asyn import get_loop

from ckn_scale import __version__
from ckn_scale.errors import ImageRejected

_MISSING = {404, 410}
_REDIRECTS = {301, 302, 303, 307, 308}
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_BLOCK_BYTES = 1 << 16
# Nobody is there at all, rather than that one answer went wrong.
_NO_HOST = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True)
class HttpPolicy:
    tries: int = 3
    pause_s: float = 0.5  # before the second try, then doubled; Retry-After where the host says so
    max_pause_s: float = 10.0
    connect_s: float = 10.0  # name lookup and handshake
    silence_s: float = 20.0  # between two bytes
    deadline_s: float = 60.0  # of one URL with all its tries; waiting for its host's turn is not counted
    connections_per_host: int = 8
    max_redirects: int = 5
    max_bytes: int = 128 << 20


def is_http(uri: str) -> bool:
    return uri.lower().startswith(("http://", "https://"))


class HttpImages:
    """Fetches for one shard: keeps connections, and remembers hosts that are dead. Safe in threads."""

    def __init__(
        self,
        policy: HttpPolicy | None = None,
        *,
        check_url: Callable[[str], None] = lambda url: None,
        resolver: Callable[[], AbstractResolver] | None = None,
    ) -> None:
        """`check_url` may refuse a URL and each that it redirects to, `resolver` what a name stands for."""
        self.policy = policy or HttpPolicy()
        self._check_url, self._resolver = check_url, resolver
        self._dead: dict[str, str] = {}  # host → why
        self._answered: set[str] = set()  # hosts that answered something
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(self.policy.connections_per_host)
        )

    def read(self, url: str) -> bytes:
        """The bytes at `url`; ImageRejected: missing, unreachable, too_large."""
        return asyncio.run_coroutine_threadsafe(self._read_in_turn(url), get_loop()).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), get_loop()).result()

    def __enter__(self) -> HttpImages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_up_on(self, url: str, reason: str) -> None:
        """Do not try the host of `url` again in this shard."""
        self._dead.setdefault(_host_of(url), reason)

    def check_host(self, url: str) -> None:
        """ImageRejected when the host was found dead before."""
        if (reason := self._dead.get(_host_of(url))) is not None:
            raise _unreachable(url, f"its host was given up before: {reason}")

    async def _read_in_turn(self, url: str) -> bytes:
        async with self._turns[_host_of(url)]:
            self.check_host(url)
            try:
                return await asyncio.wait_for(self._read_with_tries(url), self.policy.deadline_s)
            except asyncio.TimeoutError:
                reason = f"no whole answer within {self.policy.deadline_s:g} s"
                if _host_of(url) not in self._answered:
                    self.give_up_on(url, reason)
                raise _unreachable(url, reason) from None

    async def _read_with_tries(self, url: str) -> bytes:
        pause_s = self.policy.pause_s
        for tries_left in reversed(range(self.policy.tries)):
            try:
                return await self._follow(url)
            except _Passing as error:
                reason, wait_s = str(error), error.retry_after_s
            except _NoAnswer as error:
                reason, wait_s = str(error), 0.0
                if tries_left == 0 and error.is_of_host:
                    self.give_up_on(error.url, reason)
            if tries_left:
                await asyncio.sleep(max(pause_s, min(wait_s, self.policy.max_pause_s)))
                pause_s *= 2
        raise _unreachable(url, f"{reason} (tried {self.policy.tries} times)")

    async def _follow(self, url: str) -> bytes:
        """The body behind `url` and its redirects, each of which must lead to http(s) again."""
        at = url
        for _ in range(self.policy.max_redirects + 1):
            self._check_url(at)
            self.check_host(at)
            try:
                found = await self._read_once(at, url)
            except aiohttp.InvalidURL:
                raise _unreachable(url, f"{at[:200]!r} is not a URL") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _NoAnswer(at, error, at_all=_host_of(at) not in self._answered) from error
            if isinstance(found, bytes):
                return found
            at = urljoin(at, found.location)
            if not is_http(at):
                raise _unreachable(url, f"redirected to {at[:200]!r}, which is not http(s)")
        raise _unreachable(url, f"more than {self.policy.max_redirects} redirects")

    async def _read_once(self, url: str, named: str) -> bytes | _Redirect:
        session = await self._open_session()
        async with session.get(url, allow_redirects=False) as response:
            self._answered.add(_host_of(url))
            if response.status in _REDIRECTS and "Location" in response.headers:
                return _Redirect(response.headers["Location"])
            if response.status in _MISSING:
                raise ImageRejected("missing", f"{named} was answered with HTTP {response.status}")
            if response.status in _PASSING:
                raise _Passing(response)
            if response.status != 200:
                raise _unreachable(named, f"answered with HTTP {response.status}")
            return await self._read_body(response, named)

    async def _read_body(self, response: aiohttp.ClientResponse, url: str) -> bytes:
        """Stopped as soon as it is too large, whatever its header promised."""
        body, limit = bytearray(), self.policy.max_bytes
        if (response.content_length or 0) <= limit:
            async for block in response.content.iter_chunked(_BLOCK_BYTES):
                body += block
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        response.close()
        raise ImageRejected("too_large", f"{url} has more than {limit >> 20} MiB")

    async def _open_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise aiohttp.ClientConnectionError("the shard has ended")
        if self._session is None:
            timeout = aiohttp.ClientTimeout(
                total=None, connect=self.policy.connect_s, sock_read=self.policy.silence_s
            )
            headers = {"User-Agent": f"ckn-scale/{__version__}", "Accept": "image/*, */*;q=0.1"}
            # No limit of connections here: `_turns` counts, per host.
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, resolver=self._resolver and self._resolver()),
                trust_env=self._resolver is None,  # a proxy, where the machine has one, resolves by itself
            )
        return self._session

    async def _close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()


@dataclass(frozen=True)
class _Redirect:
    location: str


class _Passing(Exception):
    """An answer that may be another one a little later."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        super().__init__(f"answered with HTTP {response.status}")
        said = response.headers.get("Retry-After", "")
        self.retry_after_s = float(said) if said.isdecimal() else 0.0


class _NoAnswer(Exception):
    """No connection, or one that broke or fell silent; `is_of_host`: other URLs there would fail, too."""

    def __init__(self, url: str, error: Exception, *, at_all: bool) -> None:
        super().__init__(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        self.url = url
        self.is_of_host = at_all or isinstance(error, _NO_HOST)


def _unreachable(url: str, reason: str) -> ImageRejected:
    return ImageRejected("unreachable", f"{url}: {reason}")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:  # "http://[": aiohttp will say so
        return url
