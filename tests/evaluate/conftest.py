"""Small data sets of known truth, made of photographs that ship with scikit-image."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from small_sets import HOMOGRAPHY, photo, save
from typer.testing import CliRunner, Result

from ckn_scale.cli.main import app
from ckn_scale.errors import CknScaleError


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scenes of two images, one in either layout."""
    folder = tmp_path_factory.mktemp("scenes")
    image = photo("astronaut")
    warped = cv2.warpPerspective(image, HOMOGRAPHY, (260, 250))
    save(folder / "people" / "img1.png", image)
    save(folder / "people" / "img2.png", warped)
    np.savetxt(folder / "people" / "H1to2p", HOMOGRAPHY)
    save(folder / "v_people" / "1.ppm", image)
    save(folder / "v_people" / "2.ppm", warped)
    np.savetxt(folder / "v_people" / "H_1_2", HOMOGRAPHY)
    return folder


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three photographs and a blurred, turned copy of each."""
    folder = tmp_path_factory.mktemp("groups")
    rows = []
    for name in ("astronaut", "coffee", "chelsea"):
        image = photo(name, 200)
        save(folder / f"{name}.png", image)
        turned = cv2.warpAffine(image, cv2.getRotationMatrix2D((100, 80), 20, 0.9), (200, 170))
        save(folder / f"{name}-turned.png", turned)
        rows += [f"{name}.png\t{name}", f"{name}-turned.png\t{name}"]
    (folder / "groups.tsv").write_text("image\tgroup\n" + "\n".join(rows) + "\n")
    return folder


@pytest.fixture
def run(tmp_path: Path):
    """The command line in this process: exit code and output as a user sees them."""

    def call(*arguments: str | Path) -> Result:
        result = CliRunner().invoke(app, [str(one) for one in arguments])
        # `main` turns the errors made on purpose into one line; here the error itself is looked at.
        if isinstance(result.exception, CknScaleError):
            result.exit_code = result.exception.exit_code
        return result

    return call


@pytest.fixture
def cache(tmp_path: Path) -> list[str]:
    return ["--cache", str(tmp_path / "cache")]
