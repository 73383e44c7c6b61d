"""The driver dies at a random moment; the same command again ends with the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

from photo_runs import (
    assert_conserved,
    assert_some_skipped,
    copy_trained,
    digests_of,
    index_command,
    list_records,
    tiny_options,
    wait_for,
)


def test_killed_driver_is_resumed_with_equal_digests(
    photos, reference, reference_digests, user_env, command_line, tmp_path
):
    run = copy_trained(reference, tmp_path / "run")
    arguments = ("index", photos, run, *tiny_options(), "--workers", "2")
    driver = subprocess.Popen(index_command(*arguments), env=user_env)
    try:
        wait_for(lambda: list_records(run), "a shard is encoded, and more are in flight", driver)
        time.sleep(random.uniform(0, 0.3))
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    result = command_line(*arguments)
    assert result.returncode == 0, result.stderr
    assert_some_skipped(run)
    assert digests_of(run) == reference_digests
    assert_conserved(run)
