"""What verbs print besides progress: announcements on stderr, JSON and counts on stdout."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

ANNOUNCEMENTS = "ckn_scale.announcements"  # the logger of what a user reads on stderr


def announce(line: str, *, quiet: bool = False) -> None:
    """Say on stderr what begins, before seconds of imports: torch and Ray come after it."""
    if not quiet:
        logging.getLogger(ANNOUNCEMENTS).info("%s …", line)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def format_states(states: Mapping[str, int]) -> str:
    """`{"ok": 21, "truncated": 1}` → `21 ok, 1 truncated`."""
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none encoded yet"
