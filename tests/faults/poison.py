"""Photos of which one kills the process that prepares it and one hangs it, and what a run makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from photo_runs import assert_conserved, read_events

from ckn_scale.failpoints import HANG_VARIABLE, KILL_VARIABLE
from ckn_scale.runs.status import list_failures
from ckn_scale.storage.run_folder import RunFolder

KILLER, HANGER = "killer.jpg", "hanger.jpg"
POISON = {KILL_VARIABLE: KILLER, HANG_VARIABLE: HANGER}
IMAGE_DEADLINE_S = 5


def copy_with_poison(photos: Path, folder: Path) -> Path:
    """Some of the photos, and the two."""
    folder.mkdir()
    for name in ("coffee", "rocket", "chelsea"):
        for path in sorted(photos.glob(f"{name}*.jpg")):
            shutil.copy(path, folder / path.name)
    for name in (KILLER, HANGER):
        shutil.copy(folder / "coffee.jpg", folder / name)
    return folder


def poison_options(trained: Path) -> list[str]:
    """With the models of another run, so that the two are met once, in encoding."""
    return [
        *("--models", str(trained), "--set", f"encode.image_deadline_s={IMAGE_DEADLINE_S}"),
        *("--set", "publish.max_failed_share=0.5", "--accept"),
    ]


def assert_two_rows_lost(run: Path) -> None:
    states = assert_conserved(run)
    planned = sum(states.values())
    assert states == {"crashed": 1, "ok": planned - 2, "timeout": 1}
    failures = {Path(row["uri"]).name: row for row in list_failures(RunFolder.open(str(run)))}
    assert failures[KILLER]["state"] == "crashed"
    assert failures[HANGER]["state"] == "timeout"
    assert read_events(run, "lost", step="encode_images"), "the killer took its worker with it, once"
