"""Training of the paper's other systems: it learns, it goes on where it stopped, its files are taken."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors
from small_sets import photo
from weight_files import caffe_layout, draw_state, encode_caffemodel, torchvision_layout

from ckn_scale.config import Resources
from ckn_scale.core.descriptors.catalogue import load_network, make_part
from ckn_scale.core.descriptors.deepcompare import load_pair_network
from ckn_scale.core.network_objectives import Classes, Pairs, draw_views
from ckn_scale.core.network_training import GradientComputer, Recipe, train_network
from ckn_scale.core.specs import NetworkSpec
from ckn_scale.errors import InputError
from ckn_scale.evaluate import train_networks
from ckn_scale.evaluate.gradient_tasks import GradientTask
from ckn_scale.evaluate.train_networks import make_recipe, train
from ckn_scale.runners.worker_groups import open_group


def cut_patches(count, side=51):
    """Squares of a photograph, some of them next to each other."""
    image = photo("coffee", 5 * side)
    places = [(row * side, column * side) for row in range(3) for column in range(5)]
    return np.stack([image[y : y + side, x : x + side] for y, x in places[:count]])


class Stopped(Exception):
    """In the middle of a training."""


def write_groups(folder, num_points=6, num_views=4, side=64):
    """A folder for each point: views of one patch, moved and with noise."""
    rng = np.random.default_rng(0)
    for point, patch in enumerate(cut_patches(num_points)):
        (folder / f"point{point}").mkdir(parents=True)
        patch = cv2.resize(patch, (side + 8, side + 8))
        for view in range(num_views):
            x, y = rng.integers(0, 8, 2)
            noise = rng.integers(-10, 10, (side, side, 3))
            pixels = np.clip(patch[y : y + side, x : x + side] + noise, 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / f"point{point}" / f"{view}.png"), pixels)
    return folder


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    return write_groups(tmp_path_factory.mktemp("groups"))


def losses_of(objective, recipe):
    losses, computer = [], GradientComputer(objective, recipe)
    pieces = range(len(recipe.pieces))
    train_network(
        *(objective.network, recipe, lambda step, weights: computer.compute(step, weights, pieces)),
        on_step=lambda step, loss: losses.append(loss),
    )
    return losses


def test_surrogate_classes_are_learned():
    patches = cut_patches(4)
    objective = Classes([one[None] for one in patches], seed=1)
    losses = losses_of(objective, Recipe(steps=24, batch_size=12, rate=0.01, num_pieces=2))
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[:4])


@pytest.mark.parametrize(("name", "rate"), [("deepcompare-siam", 0.02), ("deepcompare-2ch", 0.05)])
def test_pairs_are_learned(groups, name, rate):
    objective = Pairs(train_networks.read_groups(groups), name, seed=0)
    losses = losses_of(objective, Recipe(steps=40, batch_size=16, rate=rate, num_drops=0, num_pieces=1))
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:3])


NAME = "deepcompare-2ch2stream"


@pytest.fixture(scope="module")
def whole(groups, tmp_path_factory):
    """Trained in this process without a stop: the recipe and the bytes."""
    recipe = make_recipe(NAME, groups, steps=5, batch_size=7, rate=0.001)
    out = tmp_path_factory.mktemp("whole") / "out"
    train(NAME, groups, out, recipe)
    return recipe, out.read_bytes()


def test_a_training_that_was_stopped_ends_with_the_same_bits(groups, whole, tmp_path, monkeypatch):
    """Stopped in this process, it goes on in another one."""
    monkeypatch.setattr(train_networks, "SAVE_EVERY", 2)
    recipe, content = whole
    out = tmp_path / "out"

    def stop(what, done, total):
        if done == 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(NAME, groups, out, recipe, on_progress=stop)
    steps = []
    loss = train(
        *(NAME, groups, out, recipe),
        open_group=partial(open_group, resources=Resources(workers=1), device="cpu", threads=1),
        on_progress=lambda what, done, total: steps.append(done),
    )
    assert steps == [3, 4, 5]
    assert np.isfinite(loss)
    assert out.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert train(NAME, groups, out, recipe) is None  # it is there


@dataclass
class DyingTask:
    """A task that kills its process once, with its answer ready."""

    task: GradientTask
    marker: Path

    def __call__(self, step, weights, pieces):
        answer = self.task(step, weights, pieces)
        if step == 2 and pieces.start > 0 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def test_three_processes_give_the_same_bits_though_one_is_killed(groups, whole, tmp_path, caplog):
    recipe, content = whole
    marker = tmp_path / "killed"

    def open_three(task):
        return open_group(DyingTask(task, marker), Resources(workers=3), device="cpu", threads=1)

    train(NAME, groups, tmp_path / "out", recipe, open_group=open_three)
    assert marker.exists()
    assert "was lost, its part is done again" in caplog.text
    assert (tmp_path / "out").read_bytes() == content


def test_workers_that_compute_otherwise_are_refused(groups, tmp_path):
    """Here one of the two says so."""

    @contextmanager
    def two_kinds(task):
        class Mixed:
            size = 2

            def call_all(self, shared, parts):
                answers = [task(*shared, part) for part in parts]
                return [answers[0], answers[1]._replace(arithmetic="AVX9 (probe 0)")]

        yield Mixed()

    with pytest.raises(InputError, match=r"a worker computes with AVX9 \(probe 0\), the training was begun"):
        train("deepcompare-siam", groups, tmp_path / "out", Recipe(1, 2), open_group=two_kinds)


def test_networks_with_statistics_of_batches_are_refused():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="cannot be trained in pieces"):
        train_network(network, Recipe(1, 2), lambda step, weights: [])


def test_a_file_does_not_depend_on_where_its_data_lie(groups, tmp_path):
    recipe = Recipe(steps=1, batch_size=2)
    shutil.copytree(groups, tmp_path / "moved")
    for data, out in ((groups, "here"), (tmp_path / "moved", "there")):
        train("deepcompare-siam", data, tmp_path / out, recipe)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_a_checkpoint_of_another_recipe_is_refused(groups, tmp_path, monkeypatch):
    monkeypatch.setattr(train_networks, "SAVE_EVERY", 1)

    def stop(what, done, total):
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        train("deepcompare-siam", groups, tmp_path / "out", Recipe(3, 2), on_progress=stop)
    with pytest.raises(InputError, match=r"out.checkpoint was begun with another recipe or other data"):
        train("deepcompare-siam", groups, tmp_path / "out", Recipe(4, 2))


@pytest.mark.parametrize(
    ("trained", "names"),
    [
        ("philippnet-rome", ["philippnet", "philippnet-91"]),
        ("deepcompare-siam2stream", ["deepcompare-siam2stream"]),
    ],
)
def test_its_file_is_what_weights_takes(groups, tmp_path, trained, names):
    train(trained, groups, tmp_path / "weights", make_recipe(trained, groups, steps=1, batch_size=2))
    for name in names:
        part = make_part(NetworkSpec(name, "weights"), (tmp_path / "weights").read_bytes())
        assert load_network(part).describe(cut_patches(2)).any(axis=1).all()


def test_pair_networks_compare_patches(groups, tmp_path):
    """The score of a pair is that of its two patches and in no way of others."""
    objective = Pairs(train_networks.read_groups(groups), "deepcompare-2ch2stream", seed=0)
    network = load_pair_network("deepcompare-2ch2stream", save_safetensors(objective.export()), "file")
    left, right = cut_patches(6)[:3], cut_patches(6)[3:]
    scores = network.compare(left, right)
    np.testing.assert_allclose(network.compare(left[1:], right[1:]), scores[1:], rtol=1e-4)
    assert len(np.unique(scores)) == 3


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Two labels: reddish images, and greenish ones."""
    folder, rng = tmp_path_factory.mktemp("labels"), np.random.default_rng(0)
    for channel, label in enumerate(("red", "green")):
        (folder / label).mkdir()
        for number in range(4):
            image = rng.integers(0, 100, (160, 160, 3))
            image[..., channel] += 120
            cv2.imwrite(str(folder / label / f"{number}.png"), image[..., ::-1].astype(np.uint8))
    return folder


def draw_alexnet(layout):
    """Random weights; linear layers narrower than the published ones, with which a step takes seconds."""
    state = draw_state(layout(64, 5))
    return {key: 1.4 * one if one.ndim > 1 else 0 * one for key, one in state.items()}


def test_alexnet_learns_other_labels_and_describes_patches(labelled, tmp_path):
    torch.save(draw_alexnet(torchvision_layout), tmp_path / "start.pth")
    recipe = replace(
        make_recipe("alexnet-landmarks", labelled, steps=16, batch_size=6), num_drops=0, num_pieces=1
    )
    out = tmp_path / "out"
    loss = train("alexnet-landmarks", labelled, out, recipe, start=str(tmp_path / "start.pth"))
    assert loss < 0.6  # the mean of all steps; of a guess it is 0.69
    part = make_part(NetworkSpec("alexnet-conv2", "out"), out.read_bytes())
    assert load_network(part).describe(cut_patches(2)).any()
    assert make_recipe("alexnet-landmarks", labelled).steps == 60


def write_caffe_alexnet(path, *, fitting):
    """Random weights; those that fit make numbers about one of pixels that are a hundred times larger."""
    arrays = {key: one.numpy() for key, one in draw_alexnet(caffe_layout).items()}
    if fitting:
        arrays = {key: one / 1.4 for key, one in arrays.items()}
        arrays["conv1.weight"] /= 64
    path.write_bytes(encode_caffemodel(arrays, old=True))
    return arrays


def test_alexnet_of_caffe_is_trained_further(labelled, tmp_path, caplog):
    """All layers but the last begin as they are in the file; what comes out is of the same layout."""
    arrays = write_caffe_alexnet(tmp_path / "start", fitting=True)
    out, recipe = tmp_path / "out", Recipe(steps=14, batch_size=6, rate=1e-3, num_drops=0, num_pieces=1)
    loss = train("alexnet-landmarks", labelled, out, recipe, start=str(tmp_path / "start"))
    assert loss < 0.6  # the mean of all steps; of a guess it is 0.69
    assert "is not the published file" in caplog.text
    found = load_safetensors(out.read_bytes())
    assert found.keys() == arrays.keys()
    assert found["fc8.weight"].shape == (2, 64)
    assert 0.005 < found["fc8.weight"].std() < 0.02
    np.testing.assert_allclose(found["conv5.weight"], arrays["conv5.weight"], atol=0.05)


def test_weights_that_do_not_fit_their_pixels_are_one_sentence(labelled, tmp_path):
    write_caffe_alexnet(tmp_path / "start", fitting=False)
    recipe = Recipe(steps=14, batch_size=2, rate=1e-3, num_pieces=1)
    with pytest.raises(InputError, match=r"the loss is \w+ at step \d+: try a lower .* pixels of 0 … 255"):
        train("alexnet-landmarks", labelled, tmp_path / "out", recipe, start=str(tmp_path / "start"))


@pytest.mark.parametrize(
    ("name", "start", "sentence"),
    [
        ("alexnet-landmarks", None, "--start is for alexnet-landmarks, which needs it"),
        ("philippnet", "x", "--start is for alexnet-landmarks"),
        ("deepcompare-siam", None, "must hold two folders or more"),
        ("philippnet", None, "there is no image in"),
    ],
)
def test_bad_data_are_one_sentence(tmp_path, name, start, sentence):
    folder = tmp_path / "data"
    folder.mkdir()
    if name == "deepcompare-siam":
        cv2.imwrite(str(folder / "one.png"), np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(InputError, match=sentence):
        train(name, folder, tmp_path / "out", Recipe(1, 2), start=start)


def test_views_are_of_their_patch():
    patches = cut_patches(3)
    views = draw_views(patches, 64, torch.Generator().manual_seed(0))
    assert views.shape == (3, 3, 64, 64)
    assert 0 <= float(views.min()) <= float(views.max()) <= 1
    again = draw_views(patches, 64, torch.Generator().manual_seed(1))
    assert not torch.equal(views, again)
