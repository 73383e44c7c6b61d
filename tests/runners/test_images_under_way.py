"""Progress counts images of shards that are not done yet, whoever does them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from web_hosts import WebHost

from ckn_scale.config import Resources, load_settings
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.pipeline import open_driver, sample
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.run_folder import RunFolder

SAMPLE = """
import sys
from ckn_scale.config import Resources, load_settings
from ckn_scale.pipeline import open_driver, sample
from ckn_scale.storage.run_folder import RunFolder

run, workers, ray = sys.argv[1:]
resources = Resources(workers=int(workers), ray=ray or None, read_ahead=1)
with open_driver(RunFolder.open(run), resources, lambda said: print(said.images, flush=True)) as driver:
    sample(driver)
"""


@pytest.fixture
def host():
    with WebHost(encode_jpeg(read_photo("coffee"), 90)) as host:
        yield host


@pytest.fixture
def run(host, tmp_path):
    """One shard of four images, the last of which comes when it is released."""
    paths = ("a.jpg", "b.jpg", "c.jpg", "held/d.jpg")
    (tmp_path / "list.txt").write_text("".join(f"{host.url}/{path}\n" for path in paths))
    plan_images(str(tmp_path / "run"), load_settings("tiny"), str(tmp_path / "list.txt"))
    return str(tmp_path / "run")


@pytest.mark.parametrize(("workers", "ray"), [("0", ""), ("1", ""), ("1", "local")])
def test_images_are_told_while_the_last_is_waited_for(host, run, user_env, workers, ray):
    command = [sys.executable, "-c", SAMPLE, run, workers, ray]
    with subprocess.Popen(command, env=user_env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if 0 < int(line) < 4:
                host.released.set()
        assert process.wait() == 0
    assert line == "4\n"
    assert host.asked["/held/d.jpg"] == 1, "it was not held until its host gave up"


def test_error_of_the_callers_hook_is_not_held_against_the_shard(host, run):
    host.released.set()

    def refuse(progress):
        if progress.images:
            raise LookupError("of the caller")

    with (
        pytest.raises(LookupError, match="of the caller"),
        open_driver(RunFolder.open(run), Resources(workers=0), refuse) as driver,
    ):
        sample(driver)
    assert host.asked["/a.jpg"] == 1, "nor is it tried again"
