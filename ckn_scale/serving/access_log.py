"""One JSON object per request, on stderr or in a file: who asked what, from which version, how long it took.

Never the image, the key or the query string: a key is named by the first digits of its sha256.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any

from ckn_scale.errors import InputError
from ckn_scale.serving.request_record import RequestRecord

STDERR = "-"
MAX_PATH = 200
_FIELDS = (
    *("request_id", "client", "key", "method", "path", "route", "status", "code", "bytes_in", "bytes_out"),
    *("version", "partial", "coverage", "found", "groups_left_out", "timings_ms"),
)


class AccessLog:
    """Writes records to a file, which may be moved away meanwhile (logrotate), or to stderr for "-"."""

    def __init__(self, target: str) -> None:
        self._handler = _open_handler(target)
        self._handler.setFormatter(logging.Formatter("%(message)s"))

    def write(self, record: RequestRecord) -> None:
        line = json.dumps(describe(record), ensure_ascii=False)
        self._handler.handle(logging.makeLogRecord({"msg": line}))


def describe(record: RequestRecord) -> dict[str, Any]:
    """What the log says of a request; fields that nothing is known of are left out."""
    known = asdict(record)
    fields = {name: known[name] for name in _FIELDS if known[name] not in (None, [], {})}
    fields["path"] = record.path[:MAX_PATH]
    fields.setdefault("status", 0)  # the client went away before an answer began
    at = datetime.fromtimestamp(record.started_at, timezone.utc).isoformat(timespec="milliseconds")
    return {"at": at, **fields, "total_ms": round(1e3 * record.seconds, 2)}


def _open_handler(target: str) -> logging.Handler:
    if target == STDERR:
        return logging.StreamHandler()
    try:
        return WatchedFileHandler(target, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"cannot write the access log {target}: {error.strerror}") from None
