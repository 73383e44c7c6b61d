from __future__ import annotations

import pytest

from ckn_scale.config import load_settings
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.steps.plan import PlanReader, hash_uri, plan_images, read_sample, read_segments, shard_size
from ckn_scale.steps.sample_patches import SamplePatches


@pytest.fixture
def folder(tmp_path):
    for number in range(11):
        path = tmp_path / "images" / f"{number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (number + 1))
    return str(tmp_path / "images")


def settings(*overrides):
    return load_settings("tiny", None, ["plan.images_per_shard=4", "sample.num_images=5", *overrides])


def test_plan_images_gives_dense_ids_in_sorted_order(folder, tmp_path):
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    (segment,) = read_segments(run)
    reader = PlanReader(run, [segment])
    images = [image for shard in range(segment.num_shards) for image in reader.read_shard(shard)]
    assert [len(reader.read_shard(shard)) for shard in range(3)] == [4, 4, 3]
    assert [image.image_id for image in images] == list(range(11))
    assert [image.uri for image in images] == sorted(image.uri for image in images)
    assert {image.size_bytes for image in images} == set(range(1, 12))


def test_plan_images_is_frozen_after_the_first_call(folder, tmp_path):
    plan_images(str(tmp_path / "run"), settings(), folder)
    (tmp_path / "images" / "0" / "new.jpg").write_bytes(b"late")
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    assert read_segments(run)[0].num_images == 11


def test_sample_is_the_smallest_hashes_whatever_the_sharding(folder, tmp_path):
    samples = []
    for number, size in enumerate((1, 3, 100)):
        run = plan_images(str(tmp_path / f"run{number}"), settings(f"plan.images_per_shard={size}"), folder)
        samples.append([image.uri for image in read_sample(run, read_segments(run))])
    uris = sorted(str(path) for path in (tmp_path / "images").rglob("*.jpg"))
    by_hash = sorted(uris, key=lambda uri: hash_uri(0, uri))[:5]
    assert samples[0] == samples[1] == samples[2] == sorted(by_hash)


@pytest.mark.parametrize(
    ("images", "largest", "size"),
    [
        (1, 256, 4),
        (70, 256, 4),
        (256, 256, 4),
        (257, 256, 5),
        (10_000, 256, 157),
        (10**6, 256, 256),
        (70, 2, 2),
    ],
)
def test_shard_size_cuts_small_sets_into_up_to_64_shards(images, largest, size):
    assert shard_size(images, largest) == size


def test_plan_images_gives_a_small_set_many_shards(folder, tmp_path):
    run = plan_images(str(tmp_path / "run"), settings("plan.images_per_shard=256"), folder)
    reader = PlanReader(run, read_segments(run))
    assert [len(reader.read_shard(shard)) for shard in range(3)] == [4, 4, 3]
    assert [*SamplePatches(run).shard_ids()] == [0, 1], "the 5 images of the sample too"


def test_hash_uri_is_the_same_on_every_machine():
    assert hash_uri(0, "s3://bucket/a.jpg") == 17997550867763933928
    assert hash_uri(0, "s3://bucket/a.jpg") != hash_uri(1, "s3://bucket/a.jpg")


def test_plan_images_refuses_an_empty_folder_and_writes_nothing(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(InputError):
        plan_images(str(tmp_path / "run"), settings(), str(tmp_path / "images"))
    assert not (tmp_path / "run").exists()


def test_plan_images_refuses_other_settings(folder, tmp_path):
    plan_images(str(tmp_path / "run"), settings(), folder)
    with pytest.raises(RunMismatch, match=r"vlad\.seed"):
        plan_images(str(tmp_path / "run"), settings("vlad.seed=9"), folder)
