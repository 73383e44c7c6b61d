"""SGD's rate candidates are shards of their own, and the layer is trained at the best of them."""

from __future__ import annotations

import pytest

from ckn_scale.config import Resources, load_settings, parse_settings
from ckn_scale.core.augmentations import render_view
from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import PHOTOS, read_photo
from ckn_scale.pipeline import train
from ckn_scale.runners.driver import open_driver
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.train_layers import SearchRates, read_rate
from ckn_scale.storage.models import read_generation

SGD = [
    "training.solver=sgd",
    "training.sgd_iterations=60",
    "training.sgd_validate_every=30",
    "training.sgd_rate_candidates=4",
    "training.num_subpatches=2000",
    "sample.num_patches=200",
]


@pytest.fixture
def folder(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for name in PHOTOS[:4]:
        (images / f"{name}.jpg").write_bytes(encode_jpeg(render_view(read_photo(name), "shrink", 0), 90))
    return str(images)


@pytest.mark.parametrize("solver", ["sgd", "nystrom"])
def test_rates_are_searched_for_sgd_alone(folder, tmp_path, solver):
    tree = load_settings("tiny", None, [*SGD, f"training.solver={solver}"]).model_dump(mode="json")
    settings = parse_settings({**tree, "channels": tree["channels"][:1]})
    run = plan_images(str(tmp_path / "run"), settings, folder)
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        train(driver)
    step = SearchRates(run, 1)
    commits = step.log.committed()
    assert "ckn-grad" in read_generation(run).models
    if solver == "nystrom":
        assert commits == {}
        assert read_rate(step, 0) is None
        return
    assert sorted(commits) == [0, 1, 2, 3]
    tried = {report["rate"]: report["error"] for report in (commit.report for commit in commits.values())}
    finite = {rate: error for rate, error in tried.items() if error is not None}
    assert read_rate(step, 0) == min(finite, key=lambda rate: finite[rate])
