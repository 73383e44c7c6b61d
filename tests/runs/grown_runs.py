"""A run of two versions, the second after an append; and damage to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from photo_runs import index_here

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import DISTRACTORS, read_photo
from ckn_scale.storage.run_folder import RunFolder

NEW = DISTRACTORS[5:8]


def make_new_photos(folder: Path) -> Path:
    """Images that the reference run does not have."""
    folder.mkdir()
    for name in NEW:
        (folder / f"new-{name}.jpg").write_bytes(encode_jpeg(read_photo(name), 90))
    return folder


def grow(reference: Path, new_photos: Path, target: Path) -> Path:
    """Version 1 has the 21 usable photographs of the reference, version 2 three more."""
    shutil.copytree(reference, target, ignore=shutil.ignore_patterns("events", "nonces"))
    index_here(new_photos, target, append=True, keep_samples=True)
    return target


def numbers_of(run: Path | str) -> list[tuple[int, int, int | None]]:
    """(number, rows, what it restores) of each version."""
    return [(one.number, one.rows, one.restores) for one in RunFolder.open(str(run)).versions.all()]


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def list_files(run: Path | str) -> dict[str, tuple[int, float]]:
    """Size and time of every file."""
    root = Path(run)
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime)
        for path in root.rglob("*")
        if path.is_file()
    }
