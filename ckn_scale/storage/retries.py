"""Which store errors may pass, and how long to wait for them.

fsspec stores speak in many tongues: builtin errors, botocore's, aiohttp's, and s3fs's translations
with the HTTP answer as their cause. The HTTP status decides where there is one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckn_scale.errors import InputError, TransientStoreError, UnsupportedStore

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_TRANSIENT_STATUS = {408, 409, 425, 429}
_TRANSIENT_CODES = {"RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,  # s3fs's translation of every code it does not know
    errno.ESTALE,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    getattr(errno, "EREMOTEIO", errno.EIO),
}
_FULL_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNUSABLE = {  # paths that no second try makes good
    errno.ENOTDIR: "a file is where a folder is needed",
    errno.EROFS: "its file system is read-only",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ELOOP: "its links form a loop",
}
_PERMANENT = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_NETWORK_CLASSES = {  # botocore's and aiohttp's, by name: neither package need be installed
    "HTTPClientError",
    "ConnectionError",
    "ConnectionClosedError",
    "IncompleteReadError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
    "IncompleteRead",
    "ChecksumError",
}
_CREDENTIAL_CLASSES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
}


@dataclass(frozen=True)
class RetryPolicy:
    """At most `attempts` tries, with jittered, doubling pauses between them."""

    attempts: int = 8
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0

    def delays_s(self) -> Iterator[float]:
        """The pauses after each try but the last: half of the step is fixed, half is drawn."""
        for attempt in range(self.attempts - 1):
            step_s = min(self.first_delay_s * 2**attempt, self.max_delay_s)
            yield step_s * random.uniform(0.5, 1.0)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if (verdict := _by_http_answer(error)) is not None:
        return verdict
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, (TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)):
        return True
    if _class_names(error) & _NETWORK_CLASSES:
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def is_refused(error: BaseException) -> bool:
    """Whether the store refused us: wrong, missing or insufficient credentials."""
    return isinstance(error, PermissionError) or bool(_class_names(error) & _CREDENTIAL_CLASSES)


def explain(error: BaseException, where: str) -> BaseException:
    """The error to raise for `error` at `where`: one sentence where the user can act, else as it is."""
    if is_refused(error):
        return InputError(f"access to {where} was refused ({_one_line(error)}): check keys and permissions")
    if isinstance(error, OSError) and error.errno in _FULL_ERRNO:
        return UnsupportedStore(f"no room to write {where} ({_one_line(error)}): free space and run again")
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        return InputError(f"{where} cannot be used: {_UNUSABLE[error.errno]}; name another folder")
    return error


def call_with_retries(call: Callable[[], Result], policy: RetryPolicy, where: str) -> Result:
    """`call()`, again after transient errors; what is raised in the end is explained."""
    delays_s = policy.delays_s()
    while True:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise explain(error, where) from error
            wait_or_give_up(delays_s, error, where)


def wait_or_give_up(delays_s: Iterator[float], error: BaseException, where: str) -> None:
    """Sleep the next pause, or raise TransientStoreError when there is none left."""
    delay_s = next(delays_s, None)
    if delay_s is None:
        raise TransientStoreError(f"{where} failed again and again, last with {_one_line(error)}") from error
    logger.info("%s: %s; trying again in %.1f s", where, _one_line(error), delay_s)
    time.sleep(delay_s)


def _by_http_answer(error: BaseException) -> bool | None:
    """The verdict of the HTTP answer behind the error; None where there is none."""
    if isinstance(status := getattr(error, "status", None), int):  # aiohttp's
        return _is_transient_status(status)
    response: Any = None
    for candidate in (error, error.__cause__):
        response = response or getattr(candidate, "response", None)
    if not isinstance(response, dict):
        return None
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = response.get("Error", {}).get("Code", "")
    return _is_transient_status(status) or code in _TRANSIENT_CODES


def _is_transient_status(status: int) -> bool:
    return (status >= 500 and status not in (501, 505)) or status in _TRANSIENT_STATUS


def _class_names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__ if cls.__module__ != "builtins"}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
