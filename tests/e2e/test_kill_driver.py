"""The driver dies at a random moment; the same command again ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from photo_runs import digests_of, index_command, read_events, tiny_options


def test_killed_driver_is_resumed_with_equal_digests(
    photos, reference_digests, user_env, command_line, tmp_path
):
    run = tmp_path / "run"
    arguments = ("index", photos, run, *tiny_options(), "--workers", "2")
    driver = subprocess.Popen(index_command(*arguments), env=user_env, stderr=subprocess.DEVNULL)
    try:
        _wait_until_encoding(run, driver)
        time.sleep(random.uniform(0, 0.3))
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    result = command_line(*arguments)
    assert result.returncode == 0, result.stderr
    begun = read_events(run, "step_begins", step="encode_images")[-1]
    assert 0 < begun["undone"] < begun["shards"], "the rerun skips some shards and redoes some"
    assert digests_of(run) == reference_digests


def _wait_until_encoding(run: Path, driver: subprocess.Popen[bytes]) -> None:
    """Until at least one shard is recorded, and at least three are not: some are in flight now."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        assert driver.poll() is None, "the driver ended before it could be killed"
        if list((run / "commits" / "encode_images").glob("*.json")):
            return
        time.sleep(0.02)
    raise AssertionError("no shard was encoded within two minutes")
