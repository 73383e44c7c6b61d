from __future__ import annotations

import io

import pytest

from ckn_scale.cli.progress import ProgressLine, RemainingTime, format_progress
from ckn_scale.runners.driver import Progress


def encode(images, seconds, done=0, total=4):
    return Progress("encode_images", done, total, images, 64, seconds)


def test_remaining_time_counts_images_and_falls_between_two_counts():
    remaining = RemainingTime()
    assert remaining.estimate(encode(0, 0.0)) is None
    assert remaining.estimate(encode(0, 5.0)) is None
    assert remaining.estimate(encode(16, 8.0)) == pytest.approx(24.0)
    assert remaining.estimate(encode(16, 9.0)) == pytest.approx(23.0), "no image since, a second less"
    assert remaining.estimate(encode(16, 99.0)) == 0.0
    assert remaining.estimate(encode(32, 16.0)) == pytest.approx(16.0)


def test_remaining_time_goes_by_the_pace_of_this_call():
    remaining = RemainingTime()
    remaining.estimate(encode(32, 0.0))
    assert remaining.estimate(encode(48, 4.0)) == pytest.approx(4.0)


def test_remaining_time_counts_shards_where_there_are_no_images():
    remaining = RemainingTime()
    remaining.estimate(Progress("train", 0, 4, 0, 0, 0.0))
    assert remaining.estimate(Progress("train", 1, 4, 0, 0, 2.0)) == pytest.approx(6.0)


def test_format_progress_counts_images_first():
    line = format_progress(encode(48, 9.0, done=1), 18.2)
    assert line.split() == ["encode_images", "48/64", "images", "1/4", "shards", "about", "18", "s", "left"]
    ended = format_progress(Progress("build_index-0123456789abcdef", 3, 3, 0, 0, 1.5), None)
    assert ended.split() == ["build_index", "3/3", "shards", "1.5", "s"]


def test_progress_line_in_a_log_says_the_end_of_a_step_once():
    log = io.StringIO()
    line = ProgressLine(log)
    for images, done in ((0, 0), (20, 1), (64, 4), (64, 4)):
        line(encode(images, 1.0, done))
    assert log.getvalue().count("\n") == 1
    assert "64/64 images" in log.getvalue()


def test_progress_line_is_quiet_when_told():
    log = io.StringIO()
    ProgressLine(log, quiet=True)(encode(64, 1.0, 4))
    assert log.getvalue() == ""
