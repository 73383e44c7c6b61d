"""Which images certify a version: of all segments, and not those the models were trained on."""

from __future__ import annotations

import pytest

from ckn_scale.config import load_settings
from ckn_scale.steps.draw_queries import draw_queries, read_draw, write_draw
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.plans import hash_uri, read_sample, read_segments
from ckn_scale.storage.run_records import Generation


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "images"
    path.mkdir()
    for number in range(30):
        (path / f"{number:03d}.jpg").write_bytes(b"x" * (number + 1))
    return path


def plan(folder, tmp_path, *overrides, append=False):
    chosen = load_settings("tiny", None, ["plan.images_per_shard=4", *overrides])
    run = plan_images(str(tmp_path / "run"), chosen, str(folder), append=append)
    return run, read_segments(run)


def ids(images):
    return {image.image_id for image in images}


def test_queries_are_the_smallest_hashes_outside_the_sample(folder, tmp_path):
    run, segments = plan(folder, tmp_path, "sample.num_images=12", "publish.num_queries=6")
    draw = draw_queries(run, segments, None)
    sample = ids(read_sample(run, segments))
    uris = sorted(str(path) for path in folder.iterdir())
    outside = [number for number in range(30) if number not in sample]
    wanted = sorted(outside, key=lambda number: hash_uri(1, uris[number]))[:6]
    assert [image.image_id for image in draw.asked] == wanted
    assert draw.in_sample == 0


def test_what_the_rest_does_not_give_is_drawn_from_the_sample_and_said(folder, tmp_path):
    run, segments = plan(folder, tmp_path, "sample.num_images=27", "publish.num_queries=6")
    draw = draw_queries(run, segments, None)
    assert len(ids(draw.asked)) == 6
    assert draw.in_sample == len(ids(draw.asked) & ids(read_sample(run, segments))) == 3


def test_queries_come_from_all_segments(folder, tmp_path):
    overrides = ("sample.num_images=12", "publish.num_queries=40")
    plan(folder, tmp_path, *overrides)
    for number in range(30, 40):
        (folder / f"{number:03d}.jpg").write_bytes(b"x" * (number + 1))
    run, segments = plan(folder, tmp_path, *overrides, append=True)
    draw = draw_queries(run, segments, None)
    assert ids(draw.asked) == set(range(40))
    assert draw.in_sample == 12


def test_nothing_was_trained_on_where_models_were_taken_over(folder, tmp_path):
    run, segments = plan(folder, tmp_path, "sample.num_images=30", "publish.num_queries=6")
    assert draw_queries(run, segments, None).in_sample == 6
    run.models.create(Generation(1, {}, "another run"))
    draw = draw_queries(run, segments, None)
    assert (len(draw.asked), draw.in_sample) == (6, 0)


def test_replaced_images_are_not_asked_for(folder, tmp_path):
    overrides = ("sample.num_images=12", "publish.num_queries=40")
    plan(folder, tmp_path, *overrides)
    (folder / "003.jpg").write_bytes(b"other bytes")
    run, segments = plan(folder, tmp_path, *overrides, append=True)
    assert ids(draw_queries(run, segments, None).asked) == set(range(31)) - {3}


def test_a_draw_reads_back_as_it_was_written(folder, tmp_path):
    run, segments = plan(folder, tmp_path)
    draw = draw_queries(run, segments, None)
    assert read_draw(run, write_draw(run, draw)) == draw
