"""Which images certify a version: of all segments, and not those the models were trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckn_scale.config import load_settings
from ckn_scale.steps.draw_queries import (
    QueryOutcome,
    draw_queries,
    name_encoder,
    read_draw,
    write_draw,
    write_outcomes,
)
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.deletions import find_dead
from ckn_scale.storage.index_files import write_ids
from ckn_scale.storage.plans import hash_uri, read_sample, read_segments
from ckn_scale.storage.run_records import Certificate, Deletion, Generation, Version
from ckn_scale.storage.stored_files import StoredFile, write_file


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
    draw = draw_queries(run, segments, [], None)
    sample = ids(read_sample(run, segments))
    uris = sorted(str(path) for path in folder.iterdir())
    outside = [number for number in range(30) if number not in sample]
    wanted = sorted(outside, key=lambda number: hash_uri(1, uris[number]))[:6]
    assert [image.image_id for image in draw.asked] == wanted
    assert draw.in_sample == 0


def test_what_the_rest_does_not_give_is_drawn_from_the_sample_and_said(folder, tmp_path):
    run, segments = plan(folder, tmp_path, "sample.num_images=27", "publish.num_queries=6")
    draw = draw_queries(run, segments, [], None)
    assert len(ids(draw.asked)) == 6
    assert draw.in_sample == len(ids(draw.asked) & ids(read_sample(run, segments))) == 3


def test_queries_come_from_all_segments(folder, tmp_path):
    overrides = ("sample.num_images=12", "publish.num_queries=40")
    plan(folder, tmp_path, *overrides)
    for number in range(30, 40):
        (folder / f"{number:03d}.jpg").write_bytes(b"x" * (number + 1))
    run, segments = plan(folder, tmp_path, *overrides, append=True)
    draw = draw_queries(run, segments, [], None)
    assert ids(draw.asked) == set(range(40))
    assert draw.in_sample == 12


def test_nothing_was_trained_on_where_models_were_taken_over(folder, tmp_path):
    run, segments = plan(folder, tmp_path, "sample.num_images=30", "publish.num_queries=6")
    assert draw_queries(run, segments, [], None).in_sample == 6
    run.models.create(Generation(1, {}, "another run"))
    draw = draw_queries(run, segments, [], None)
    assert (len(draw.asked), draw.in_sample) == (6, 0)


def test_dead_images_are_not_asked_for(folder, tmp_path):
    overrides = ("sample.num_images=12", "publish.num_queries=40")
    plan(folder, tmp_path, *overrides)
    (folder / "003.jpg").write_bytes(b"other bytes")
    run, segments = plan(folder, tmp_path, *overrides, append=True)
    dead = find_dead(run, segments, [Deletion(1, "user", write_ids(run.store, "some.ids", np.array([5, 7])))])
    assert (dead.replaced.tolist(), dead.deleted.tolist()) == ([3], [5, 7])
    assert ids(draw_queries(run, segments, [], None, dead.ids).asked) == set(range(31)) - {3, 5, 7}


def test_a_draw_reads_back_as_it_was_written(folder, tmp_path):
    run, segments = plan(folder, tmp_path)
    draw = draw_queries(run, segments, [], None)
    assert read_draw(run, write_draw(run, draw)) == draw


def publish(run, unasked_rows, shards):
    """A published version whose queries, newest first, left so many rows unasked."""
    outcomes = [
        QueryOutcome(
            image_id, 0, "first", write_file(run.store, f"queries/{image_id}.parquet", b"vector", 1), rows
        )
        for image_id, rows in enumerate(unasked_rows)
    ]
    kept = write_outcomes(run, "first", outcomes, shards)
    certificate = Certificate(encoder=name_encoder(run), outcomes=kept)
    return Version(1, "build", StoredFile("manifest", "0", 1), 1, 1, 1, {}, certificate=certificate)


def append_three(folder, tmp_path, *overrides):
    for number in range(30, 33):
        (folder / f"{number:03d}.jpg").write_bytes(b"x" * (number + 1))
    return plan(folder, tmp_path, *overrides, append=True)


def test_the_first_version_is_asked_through_the_whole_index(folder, tmp_path):
    run, segments = plan(folder, tmp_path)
    draw = draw_queries(run, segments, range(100), None)
    assert (draw.new_shards, draw.older_shards) == (tuple(range(100)), ())


@pytest.mark.parametrize("stood", [20, 2000])
def test_what_an_append_asks_does_not_grow_with_the_index(folder, tmp_path, stood):
    run, _ = plan(folder, tmp_path)
    current = publish(run, [0] * 16, range(stood))
    run, segments = append_three(folder, tmp_path)
    draw = draw_queries(run, segments, range(stood + 1), current)
    assert ids(draw.asked) == {30, 31, 32}
    assert draw.new_shards == (stood,)
    assert len(set(draw.older_shards)) == 8
    assert set(draw.older_shards) < set(range(stood))
    assert draw == draw_queries(run, segments, range(stood + 1), current)
    another = draw_queries(run, segments, [*range(stood), stood + 7], current)
    assert another.older_shards != draw.older_shards, "not the same few at every append"


def test_an_index_of_few_shards_is_asked_whole_after_an_append(folder, tmp_path):
    run, _ = plan(folder, tmp_path)
    current = publish(run, [0] * 16, range(6))
    draw = draw_queries(*append_three(folder, tmp_path), range(7), current)
    assert (draw.new_shards, draw.older_shards) == ((6,), tuple(range(6)))


def test_half_of_the_queries_stay_those_that_were_asked_everywhere(folder, tmp_path):
    overrides = ("publish.num_queries=8",)
    run, _ = plan(folder, tmp_path, *overrides)
    current = publish(run, [9, 9, 9, 9, 0, 0, 0, 0], range(100))
    draw = draw_queries(*append_three(folder, tmp_path, *overrides), range(101), current)
    assert len(draw.asked) == 3
    assert [one.image_id for one in draw.taken_over] == [0, 4, 5, 6, 7]


def test_all_is_asked_anew_where_the_vector_of_a_query_is_lost(folder, tmp_path):
    run, _ = plan(folder, tmp_path)
    current = publish(run, [0] * 16, range(20))
    (tmp_path / "run" / "queries" / "5.parquet").write_bytes(b"damage")
    draw = draw_queries(*append_three(folder, tmp_path), range(21), current)
    assert (len(draw.asked), draw.taken_over, draw.new_shards) == (16, (), tuple(range(21)))


def test_appends_of_one_image_each_do_not_all_ask_the_same_view(folder, tmp_path):
    run, _ = plan(folder, tmp_path)
    current = publish(run, [0] * 16, range(4))
    run, segments = append_three(folder, tmp_path)
    draw = draw_queries(run, segments, range(5), current)
    one_each = [replace(draw, asked=(image,)) for image in draw.asked]
    assert len({each.view(0, 3) for each in one_each}) == 3
