"""Verbs in processes of their own that stop at a failpoint while the test does something else."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from photo_runs import index_command

from ckn_scale.failpoints import SHARD_VARIABLE


def stop_at(place: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """A verb that stops at a place, and has stopped there."""
    env = {**os.environ, SHARD_VARIABLE: f"{place}:STOP"}
    process = subprocess.Popen(index_command(*arguments), env=env, stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert process.poll() is None, f"it ended before {place}"
    return process


def go_on(process: subprocess.Popen[bytes]) -> None:
    """It goes on, to a good end."""
    process.send_signal(signal.SIGCONT)
    assert process.wait(240) == 0
