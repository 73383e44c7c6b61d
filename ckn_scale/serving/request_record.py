"""What is known of a request at its end, for metrics and the access log: never the image, never the key.

The gate opens a record; whoever answers notes what it knows by the functions below, wherever it runs.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class RequestRecord:
    request_id: str
    method: str
    path: str  # without the query string
    client: str
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    route: str = "other"  # the pattern that its path matches
    key: str | None = None
    status: int | None = None  # None: the client went away before an answer began
    code: str | None = None  # of an error
    bytes_in: int = 0
    bytes_out: int = 0
    # Of an answer from the index
    version: int | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    partial: bool | None = None
    coverage: float | None = None
    found: bool | None = None
    groups_left_out: list[int] = field(default_factory=list)
    charge_more: Callable[[int], None] = lambda count: None


_CURRENT: ContextVar[RequestRecord] = ContextVar("request")


def begin_request(scope: MutableMapping[str, Any]) -> RequestRecord:
    """A record of this request, to which what runs in this context notes things; the scope has its id."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    usable = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(8)
    client = (scope.get("client") or ("", 0))[0]
    record = RequestRecord(usable, scope["method"], scope["path"], client)
    _CURRENT.set(record)
    scope["request_id"] = record.request_id
    return record


def end_request(record: RequestRecord, scope: MutableMapping[str, Any]) -> None:
    record.seconds = time.perf_counter() - record.began
    record.route = getattr(scope.get("route"), "path", "other")


def request_id() -> str:
    """What this request is called in logs and in its answer."""
    return current_record().request_id


def note_error(code: str) -> None:
    current_record().code = code


def note_answer(
    *,
    version: int,
    timings_ms: Mapping[str, float],
    partial: bool = False,
    coverage: float = 1.0,
    found: bool | None = None,
) -> None:
    record = current_record()
    record.version, record.timings_ms = version, dict(timings_ms)
    record.partial, record.coverage, record.found = partial, coverage, found


def note_group_left_out(group: int) -> None:
    current_record().groups_left_out.append(group)


def note_searches(count: int) -> None:
    """A request that asks for several searches costs its key as many."""
    current_record().charge_more(count - 1)


def current_record() -> RequestRecord:
    """The request's record; outside of one, a record that nobody reads."""
    return _CURRENT.get(None) or RequestRecord("", "", "", "")
