"""Runs whose images are described by other networks than CKNs: all else goes as with them."""

from __future__ import annotations

import numpy as np
import pytest
from photo_runs import OVERRIDES, digests_of
from weight_files import write_tfeat

from ckn_scale.client import Client
from ckn_scale.config import Resources, load_settings
from ckn_scale.core.encoder import ImageEncoder
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.pipeline import index_images
from ckn_scale.runs.verify import verify_run
from ckn_scale.search.engine import open_index
from ckn_scale.serving.local import answering
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.storage.models import load_models, read_generation
from ckn_scale.storage.run_folder import RunFolder


def index(photos, run, descriptor, *weights, workers=0, **options):
    settings = load_settings("tiny", None, OVERRIDES, descriptor=descriptor, weights=weights)
    return index_images(str(photos), str(run), settings, Resources(workers=workers), **options)


@pytest.fixture(scope="module")
def rootsift(photos, tmp_path_factory):
    run = tmp_path_factory.mktemp("rootsift") / "run"
    index(photos, run, "rootsift")
    return run


def test_rootsift_is_indexed_and_searched_with_evidence(rootsift, photos):
    assert not verify_run(RunFolder.open(str(rootsift))).problems
    answer = open_index(str(rootsift)).search(photos / "astronaut.jpg", 2, verify=True)
    assert [hit.uri.rsplit("/")[-1] for hit in answer] == ["astronaut.jpg", "astronaut-tilt.jpg"]
    assert answer[1].match
    assert answer[1].inliers > 10


def test_rootsift_has_the_same_bytes_with_three_workers(rootsift, photos, tmp_path):
    index(photos, tmp_path / "run", "rootsift", workers=3)
    assert digests_of(tmp_path / "run") == digests_of(rootsift)


def test_its_rows_are_those_of_the_network(rootsift):
    """Without a projection in the settings the VLAD is of RootSIFT itself; points have one of their own."""
    run = RunFolder.open(str(rootsift))
    encoder = ImageEncoder.from_parts(load_models(run.store, read_generation(run).models))
    (channel,) = encoder.channels
    patches = np.random.default_rng(0).integers(0, 255, (5, 51, 51, 3), np.uint8)
    rows, points = channel.descriptor.describe_with(patches, [channel.points])
    np.testing.assert_allclose(rows, channel.descriptor.network.describe(patches), atol=1e-6)
    assert (channel.name, rows.shape[1], points.shape[1]) == ("rootsift", 128, 128)


def test_weights_become_a_model_of_the_run(photos, tmp_path):
    """The file is read when the run is planned; afterwards it may go, and other runs take the models over."""
    weights, run = write_tfeat(tmp_path / "tfeat.params"), tmp_path / "run"
    index(photos, run, "rootsift+tfeat", str(weights), accept=True)
    models = read_generation(RunFolder.open(str(run))).models
    assert {"network-tfeat", "network-rootsift", "projection-tfeat"} <= models.keys()
    weights.unlink()
    again = index(photos, run, "rootsift+tfeat", str(weights), accept=True)
    assert again.version == 1
    assert not any(step.done for step in again.steps)
    write_tfeat(weights, seed=1)
    with pytest.raises(RunMismatch, match="weights"):
        index(photos, run, "rootsift+tfeat", str(weights))


def test_models_are_taken_over_and_give_the_same_bytes(rootsift, photos, tmp_path):
    index(photos, tmp_path / "run", None, models=str(rootsift), workers=1)
    taken = RunFolder.open(str(tmp_path / "run"))
    assert read_generation(taken).models == read_generation(RunFolder.open(str(rootsift))).models
    assert digests_of(tmp_path / "run") == digests_of(rootsift)


@pytest.mark.parametrize(
    ("descriptor", "make", "sentence"),
    [
        ("tfeat", None, "tfeat needs its weights: --weights FILE, from https://"),
        ("tfeat", "absent", "no such file"),
        ("tfeat", "text", "holds no weights of torch, Caffe or safetensors"),
        ("tfeat", "other", "holds no weights of tfeat: features.1.weight is missing"),
        ("tfeet", None, "unknown descriptor 'tfeet'; there are: ckn-grad"),
    ],
)
def test_missing_or_wrong_weights_are_one_sentence(photos, tmp_path, descriptor, make, sentence):
    import torch

    file = tmp_path / "weights.pth"
    if make == "text":
        file.write_text("no weights")
    if make == "other":
        torch.save({"conv.weight": torch.zeros(3)}, file)
    with pytest.raises(InputError, match=sentence) as raised:
        index(photos, tmp_path / "run", descriptor, *([] if make is None else [str(file)]))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_rootsift_is_served(rootsift, photos):
    """One process that answers over HTTP, as `ckn-scale serve --local` does."""
    with answering(ServeSettings(run_url=str(rootsift), require_keys=False)) as url, Client(url) as client:
        answer = client.search(photos / "coffee.jpg", 2, verify=True)
    assert [hit.uri.rsplit("/")[-1] for hit in answer] == ["coffee.jpg", "coffee-tilt.jpg"]
    assert answer.found
