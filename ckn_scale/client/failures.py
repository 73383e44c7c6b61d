"""What a server's refusals become, and when to ask again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from ckn_scale.errors import (
    AccessDenied,
    CknScaleError,
    ImageRejected,
    InputError,
    NotFound,
    ServerBusy,
    ServerError,
    ServerUnreachable,
)

BUSY = (429, 502, 503, 504)
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0


@dataclass(frozen=True)
class Retries:
    """How often and how long a busy or missing server is asked again before its error is raised."""

    attempts: int = 6
    max_wait_s: float = 30.0  # all waits together


class Attempts:
    """The tries of one call."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._made = 0
        self._waited_s = 0.0

    def next_wait(self, failure: CknScaleError) -> float:
        """Seconds until the next try; raises `failure` when it would not help or takes too long."""
        self._made += 1
        wait_s: float = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._made - 1)) * random.uniform(0.5, 1.0)
        if isinstance(failure, ServerBusy) and failure.retry_after_s is not None:
            wait_s = failure.retry_after_s * random.uniform(1.0, 1.2)  # clients do not come back all at once
        may_help = isinstance(failure, ServerBusy) or (
            isinstance(failure, ServerUnreachable) and failure.code != "timeout"
        )
        self._waited_s += wait_s
        if not may_help or self._made >= self._retries.attempts or self._waited_s > self._retries.max_wait_s:
            raise failure
        return wait_s


def explain_transport(error: httpx.TransportError, url: str) -> ServerUnreachable:
    if isinstance(error, httpx.TimeoutException):
        return ServerUnreachable(f"{url} did not answer in time", code="timeout")
    return ServerUnreachable(f"{url} cannot be reached: {error or type(error).__name__}", code="transport")


def check_status(response: httpx.Response) -> httpx.Response:
    """The response; the error that it says, where it is one."""
    if response.is_success:
        return response
    raise explain_error(response.status_code, _read_error(response), response.headers)


def explain_error(status: int, error: dict[str, Any], headers: httpx.Headers | None = None) -> CknScaleError:
    """The exception for an error of the API, as this process would raise it where it can."""
    headers = headers or httpx.Headers()
    code, message = str(error.get("code", "")), str(error.get("message", f"the server answered {status}"))
    if code == "image_rejected":
        return ImageRejected(str(error.get("state", "corrupt")), str(error.get("reason", message)))
    for statuses, kind in (((401, 403), AccessDenied), ((404,), NotFound), ((400, 413, 415), InputError)):
        if status in statuses:
            return kind(message)
    details = {"status": status, "code": code, "request_id": headers.get("x-request-id", "")}
    if status not in BUSY:
        return ServerError(message, **details)
    busy = ServerBusy(message, **details)
    busy.retry_after_s = parse_retry_after(headers.get("retry-after"))
    return busy


def parse_retry_after(text: str | None) -> float | None:
    """Seconds, from seconds or a date; None for what is neither."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        return None


def _read_error(response: httpx.Response) -> dict[str, Any]:
    try:
        error = response.json()["error"]
        return error if isinstance(error, dict) else {}
    except (ValueError, KeyError, TypeError):
        return {}  # of a proxy, or no server of ours
