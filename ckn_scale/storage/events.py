"""What happened in a run, for people: retries, lost workers, timings. Never read to decide anything.

Each writer process has files of its own: one that grows on a local disk, one per flush on an object
store, where nothing can grow.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from typing import Any

from ckn_scale.storage import local_files
from ckn_scale.storage.records import map_in_threads, new_attempt
from ckn_scale.storage.store import Store

logger = logging.getLogger(__name__)
_FLUSH_EVENTS = 200
_FLUSH_S = 5.0


class EventLog:
    """Events of all writers of a run. Safe in threads; a failing store costs a warning, not the run."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self._writer = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{new_attempt()[:12]}"
        self._origin = {"host": socket.gethostname(), "pid": os.getpid()}
        self._lines: list[str] = []
        self._num_written = 0
        self._num_flushes = 0
        self._flushed_at = time.monotonic()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (EventLog, (self.store, self.prefix))

    def write(self, kind: str, **fields: Any) -> None:
        """Note one event now; on an object store it is sent with the next flush."""
        with self._lock:
            self._num_written += 1
            event = {"at": time.time(), "kind": kind, **self._origin, "n": self._num_written, **fields}
            self._lines.append(json.dumps(event, default=str))
            if self._is_due():
                self._flush()

    def flush(self) -> None:
        """Send what waits; call it before a process ends."""
        with self._lock:
            self._flush()

    def read_all(self) -> list[dict[str, Any]]:
        """The events of every writer, oldest first; a torn line is passed over."""
        texts = map_in_threads(self.store.read, self.store.list(self.prefix))
        events = [
            event
            for text in texts
            for line in text.decode(errors="replace").splitlines()
            if (event := _parse(line))
        ]
        return sorted(events, key=lambda event: (event["at"], event["n"]))

    def _is_due(self) -> bool:
        waited_s = time.monotonic() - self._flushed_at
        return self.store.is_local or len(self._lines) >= _FLUSH_EVENTS or waited_s >= _FLUSH_S

    def _flush(self) -> None:
        if not self._lines:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        try:
            self._send(data)
        except Exception as error:
            logger.warning("%d events of %s were lost: %s", len(self._lines), self.store.url, error)
        self._lines.clear()
        self._flushed_at = time.monotonic()

    def _send(self, data: bytes) -> None:
        if (path := self.store.local_path(f"{self.prefix}/{self._writer}.jsonl")) is not None:
            local_files.make_folder(path.parent)
            with open(path, "ab") as file:
                file.write(data)
            return
        self._num_flushes += 1
        self.store.write_new(f"{self.prefix}/{self._writer}-{self._num_flushes:06d}.jsonl", data)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"at", "n", "kind"} <= event.keys() else None
