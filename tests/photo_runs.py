"""A small photo set, the run that one process makes of it, and the command line as a user calls it.

The fixtures are made once for all tests that end to end ones and those of faults share.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OVERRIDES = ["plan.images_per_shard=2", "sample.images_per_shard=6", "publish.max_failed_share=0.1"]
AFTER_TRAINING = ("encode_images", "build_index", "plant_queries", "certify_index")
NUM_PHOTOS = 8  # of the demo's; the others are new to a run
CommandLine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make_photos` makes."""
    return make_photos(tmp_path_factory.mktemp("photos"))


def make_photos(folder: Path) -> Path:
    """Photographs, a tilted view of each, distractors, and one file that is no image."""
    from ckn_scale.core.augmentations import render_view
    from ckn_scale.core.images import encode_jpeg
    from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo

    for name in PHOTOS[:NUM_PHOTOS]:
        photo = read_photo(name)
        (folder / f"{name}.jpg").write_bytes(encode_jpeg(photo, 92))
        (folder / f"{name}-tilt.jpg").write_bytes(encode_jpeg(render_view(photo, "tilt", 1), 90))
    for name in DISTRACTORS[:5]:
        (folder / f"other-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    (folder / "broken.jpg").write_bytes(encode_jpeg(read_photo("coffee"), 90)[:2000])
    return folder


@pytest.fixture(scope="session")
def reference(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that this process makes, alone: what all others must equal."""
    run = tmp_path_factory.mktemp("reference") / "run"
    index_here(photos, run, keep_samples=True)  # tests go on from the middle of it
    return run


@pytest.fixture(scope="session")
def reference_digests(reference: Path) -> dict[str, str]:
    return digests_of(reference)


@pytest.fixture(scope="session")
def user_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a home of its own, so that Ray's files do not land in the developer's."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kit = os.pathsep.join(filter(None, [str(Path(__file__).parent), env.get("PYTHONPATH")]))
    return {**env, "HOME": str(tmp_path_factory.mktemp("home")), "OMP_NUM_THREADS": "1", "PYTHONPATH": kit}


@pytest.fixture(scope="session")
def command_line(user_env: dict[str, str]) -> CommandLine:
    """`ckn-scale …` as a process of its own."""

    def call(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**user_env, **{k: v for k, v in os.environ.items() if k.startswith("AWS_")}}
        environment |= options.pop("env", {})
        return subprocess.run(
            index_command(*arguments), env=environment, capture_output=True, text=True, timeout=600, **options
        )

    return call


def index_here(photos: Path | str, run: Path | str, **options: Any) -> Any:
    """Index in this process, without workers."""
    from ckn_scale.config import Resources, load_settings
    from ckn_scale.pipeline import index_images

    settings = load_settings("tiny", None, OVERRIDES)
    return index_images(str(photos), str(run), settings, Resources(workers=0), **options)


def plan_here(photos: Path | str, run: Path | str) -> Any:
    """List the images in this process, and nothing more: the command also says what a run takes."""
    from ckn_scale.config import load_settings
    from ckn_scale.pipeline import plan

    return plan(str(photos), str(run), load_settings("tiny", None, OVERRIDES))


def copy_trained(reference: Path, target: Path) -> Path:
    """A run as it is when its models are learned and nothing is encoded; without the sample."""
    left_out = ("vectors", "descriptors", "thumbnails", "patches", "priorities", "subpatches", "index")
    shutil.copytree(reference, target, ignore=shutil.ignore_patterns(*left_out, "events", "nonces"))
    for folder in (target / "commits").iterdir():
        if folder.name.startswith(AFTER_TRAINING):
            shutil.rmtree(folder)
    return target


def background_photos(folder: Path) -> Path:
    """Views of what the photo set does not show."""
    from ckn_scale.core.augmentations import render_view
    from ckn_scale.core.images import encode_jpeg
    from ckn_scale.demo import DISTRACTORS, PHOTOS, read_photo

    for name in (*DISTRACTORS, *PHOTOS[NUM_PHOTOS:]):
        for view in ("tilt", "shrink"):
            data = encode_jpeg(render_view(read_photo(name), view, 3), 90)
            (folder / f"background-{name}-{view}.jpg").write_bytes(data)
    return folder


def finish_with_background(reference: Path, background: Path, target: Path) -> Any:
    """The reference run as if it had a background: learned again from there on, and encoded."""
    from ckn_scale.config import Resources, load_settings
    from ckn_scale.pipeline import train
    from ckn_scale.runners.driver import open_driver
    from ckn_scale.steps.encode_images import EncodeImages
    from ckn_scale.steps.plan_images import record_background
    from ckn_scale.storage.run_folder import RunFolder

    shutil.copytree(reference, target, ignore=shutil.ignore_patterns("events", "nonces", "index"))
    for folder in (target / "commits").iterdir():
        if folder.name.startswith(("sample_vlads", "train_reduction", *AFTER_TRAINING)):
            shutil.rmtree(folder)
    for record in (target / "models").glob("[0-9]*.json"):
        record.unlink()
    run, settings = RunFolder.open(str(target)), load_settings("tiny", None, OVERRIDES)
    record_background(run, settings, str(background))
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        train(driver)
        driver.run_step(EncodeImages(driver.run))
    return run


def index_command(*arguments: str | Path) -> list[str]:
    return [str(Path(sys.executable).parent / "ckn-scale"), *map(str, arguments)]


def tiny_options() -> list[str]:
    return ["--preset", "tiny", *(part for override in OVERRIDES for part in ("--set", override))]


def digests_of(run: Path | str) -> dict[str, str]:
    from ckn_scale.runs.digest import digest_run
    from ckn_scale.storage.run_folder import RunFolder

    return digest_run(RunFolder.open(str(run)))


def read_commits(run: Path | str, step: str = "encode_images") -> dict[int, Any]:
    from ckn_scale.storage.run_folder import RunFolder

    return RunFolder.open(str(run)).commits(step).committed()


def read_events(run: Path | str, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    from ckn_scale.storage.run_folder import RunFolder

    events = RunFolder.open(str(run)).events.read_all()
    return [
        event
        for event in events
        if event["kind"] == kind and all(event.get(k) == v for k, v in wanted.items())
    ]


def assert_some_skipped(run: Path | str, step: str = "encode_images") -> None:
    """The last driver found some shards of the step done, and did some."""
    begun = read_events(run, "step_begins", step=step)[-1]
    assert 0 < begun["undone"] < begun["shards"], begun


def assert_conserved(run: Path | str) -> dict[str, int]:
    """Every planned image has one row in the vectors, in one state; the counts by state."""
    import pyarrow as pa

    from ckn_scale.steps.publish import read_candidate
    from ckn_scale.storage.plans import read_segments
    from ckn_scale.storage.run_folder import RunFolder
    from ckn_scale.storage.stored_files import read_table

    opened = RunFolder.open(str(run))
    planned = sum(segment.num_images for segment in read_segments(opened))
    commits = opened.commits("encode_images").committed()
    rows = pa.concat_tables(
        read_table(opened.store, commits[one].files["vectors"], ["image_id", "state"])
        for one in sorted(commits)
    )
    assert rows.column("image_id").to_pylist() == list(range(planned))
    states = rows.column("state").to_pylist()
    counted = read_candidate(opened).states
    assert counted == {state: states.count(state) for state in sorted(set(states))}
    return counted


def wait_for(condition: Callable[[], Any], what: str, driver: Any = None, timeout_s: float = 120) -> Any:
    """The first true value of `condition`; fails when `driver`, a process, ends before."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        value = condition()
        if value:
            return value
        assert driver is None or driver.poll() is None, f"the driver ended before: {what}\n{_said(driver)}"
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def finish(driver: Any) -> tuple[str, str]:
    """Waits for a process, which must succeed: what it wrote."""
    stdout, stderr = driver.communicate(timeout=240)
    assert driver.returncode == 0, stderr
    return stdout, stderr


def _said(process: Any) -> str:
    """What a process that has ended wrote, where it was caught."""
    return process.stderr.read() if process.stderr is not None else ""


def list_records(run: Path | str, step: str = "encode_images") -> list[Path]:
    return sorted(Path(run, "commits", step).glob("[0-9]*.json"))


def parse(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
