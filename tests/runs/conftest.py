"""A run of two versions, made once for the tests of this folder; each gets a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from grown_runs import grow, make_new_photos


@pytest.fixture(scope="session")
def new_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_new_photos(tmp_path_factory.mktemp("more") / "new")


@pytest.fixture(scope="session")
def grown(reference: Path, new_photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grow(reference, new_photos, tmp_path_factory.mktemp("grown") / "run")


@pytest.fixture
def run(grown: Path, tmp_path: Path) -> Path:
    """Its own copy of a run with versions 1 and 2."""
    return shutil.copytree(grown, tmp_path / "run")
