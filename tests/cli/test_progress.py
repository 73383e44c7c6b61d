from __future__ import annotations

import io
import logging

import pytest

from ckn_scale.cli.main import StderrHandler
from ckn_scale.cli.progress import ProgressDisplay, RemainingTime, format_count, format_progress
from ckn_scale.runners.driver import Progress


def encode(images, seconds, done=0, total=4):
    return Progress("encode_images", done, total, images, 64, seconds)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_remaining_time_goes_by_counts_and_falls_between_two_of_them():
    remaining = RemainingTime()
    assert remaining.estimate(0, 64, 0.0) is None
    assert remaining.estimate(0, 64, 5.0) is None
    assert remaining.estimate(16, 64, 8.0) == pytest.approx(24.0)
    assert remaining.estimate(16, 64, 9.0) == pytest.approx(23.0), "no image since, a second less"
    assert remaining.estimate(16, 64, 99.0) == 0.0
    assert remaining.estimate(32, 64, 16.0) == pytest.approx(16.0)


def test_remaining_time_goes_by_the_pace_of_this_call():
    remaining = RemainingTime()
    remaining.estimate(32, 64, 0.0)
    assert remaining.estimate(48, 64, 4.0) == pytest.approx(4.0)


def test_format_progress_counts_images_first():
    text = format_progress(encode(48, 9.0, done=1), 18.2)
    assert text.split() == ["48/64", "images", "1/4", "shards", "about", "18", "s", "left"]
    ended = format_progress(Progress("build_index-0123456789abcdef", 3, 3, 0, 0, 1.5), None)
    assert ended.split() == ["3/3", "shards", "1.5", "s"]


def test_format_count_of_an_unknown_total():
    assert format_count(5, 0, None) == "5 done"
    assert format_count(5, 12, 18.2) == "5/12  about 18 s left"


def test_steps_in_a_log_have_one_line_at_their_end():
    log = io.StringIO()
    with ProgressDisplay(log) as display:
        for images, done in ((0, 0), (20, 1), (64, 4), (64, 4)):
            display.show_step(encode(images, 1.0, done))
        display.show_step(Progress("build_index-0123456789abcdef", 3, 3, 0, 0, 1.5))
    first, second = log.getvalue().splitlines()
    assert first.split() == ["encode_images", "64/64", "images", "4/4", "shards", "1.0", "s"]
    assert second.split() == ["build_index", "3/3", "shards", "1.5", "s"]
    assert "\x1b" not in log.getvalue()


def test_log_gets_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ckn_scale.cli.progress.time.monotonic", lambda: now[0])
    log = io.StringIO()
    with ProgressDisplay(log) as display:
        for seconds, done in ((0, 1), (5, 4), (16, 9), (20, 11), (32, 17)):
            now[0] = 100.0 + seconds
            display.show_count("grid", done, 33)
    assert [line.split()[:2] for line in log.getvalue().splitlines()] == [["grid", "9/33"], ["grid", "17/33"]]
    assert "about 32 s left" in log.getvalue()


def test_terminal_shows_a_bar_and_keeps_the_line_of_what_ended(terminal):
    with ProgressDisplay(terminal) as display:
        display.show_step(encode(16, 8.0, done=1))
        shown = terminal.getvalue()
        assert "━" in shown
        assert "16/64 images" in shown
        display.show_step(encode(64, 12.0, done=4))
    last = terminal.getvalue().splitlines()[-1]
    assert last.endswith("64/64 images  4/4 shards  12.0 s")


def test_remaining_time_of_a_step_without_images_goes_by_its_shards(terminal, monkeypatch):
    monkeypatch.setattr("ckn_scale.cli.progress.LIVE_EVERY_S", 0.0)
    with ProgressDisplay(terminal) as display:
        display.show_step(Progress("train", 0, 4, 0, 0, 0.0))
        display.show_step(Progress("train", 1, 4, 0, 0, 2.0))
        assert "1/4 shards  about 6 s left" in terminal.getvalue()


def test_bar_is_erased_at_the_end(terminal):
    with ProgressDisplay(terminal) as display:
        display.show_count("grid [1]", 3, 12)
        assert "grid [1]" in terminal.getvalue(), "no markup"
    assert terminal.getvalue().endswith("\x1b[2K")


def test_log_line_goes_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal)
    handler = StderrHandler()
    with ProgressDisplay(terminal) as display:
        display.show_count("grid", 3, 12)
        before = terminal.getvalue()
        handler.emit(logging.LogRecord("x", logging.WARNING, "x.py", 1, "tried again", None, None))
        written = terminal.getvalue().removeprefix(before)
    line, _, bar = written.partition("tried again")
    assert line.endswith("\x1b[2K"), "the bar is erased first"
    assert "3/12" in bar


def test_progress_is_quiet_when_told(terminal):
    display = ProgressDisplay(terminal, quiet=True)
    display.show_step(encode(64, 1.0, 4))
    display.show_count("grid", 3, 12)
    assert terminal.getvalue() == ""
