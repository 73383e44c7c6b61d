"""Bad input: one clear line, exit code 2, nothing half-written. And honest exit codes for bad images."""

from __future__ import annotations

import socket

import pytest
from photo_runs import parse, tiny_options


def _assert_refused(result, *words):
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "compcat"], ["compcat", "compact"]),
        (["--preset", "tiny", "--set", "vlad.num_word=8"], ["vlad.num_word"]),
        (["--preset", "tiny", "--set", "vlad.num_words=0"], ["num_words must be ≥ 1, got 0"]),
        (["--preset", "tiny", "--set", "vlad"], ["key.path=value"]),
        (["--preset", "tiny", "--config", "none.toml"], ["none.toml"]),
        (["--preset", "tiny", "--ray", "somewhere"], ["ray", "somewhere"]),
    ],
)
def test_bad_settings_are_refused(photos, command_line, tmp_path, options, words):
    result = command_line("index", photos, tmp_path / "run", *options)
    _assert_refused(result, *words)
    assert not (tmp_path / "run").exists()


def test_missing_folder_is_refused(command_line, tmp_path):
    result = command_line("index", tmp_path / "nowhere", tmp_path / "run", "--preset", "tiny")
    _assert_refused(result, "nowhere")
    assert not (tmp_path / "run").exists()


def test_folder_without_images_is_refused(command_line, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "note.txt").write_text("no image")
    result = command_line("index", tmp_path / "texts", tmp_path / "run", "--preset", "tiny")
    _assert_refused(result, "texts")
    assert not (tmp_path / "run").exists()


def test_run_of_other_settings_is_refused(photos, reference, command_line):
    options = [*tiny_options(), "--set", "vlad.num_words=8"]
    result = command_line("index", photos, reference, *options)
    _assert_refused(result, "vlad.num_words", "16", "8")


@pytest.mark.parametrize("verb", ["index", "plan"])
def test_another_source_than_the_run_was_planned_from_is_refused(
    photos, reference, command_line, tmp_path, verb
):
    (tmp_path / "empty").mkdir()
    result = command_line(verb, tmp_path / "empty", reference, *tiny_options())
    _assert_refused(result, f"planned from {photos}", f"{tmp_path}/empty", "--append", "another run folder")


def test_port_in_use_is_refused(reference, command_line):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _assert_refused(command_line("serve", reference, "--port", str(port)), str(port))


@pytest.mark.parametrize("verb", [["status"], ["digest"], ["failures"], ["serve"]])
def test_no_run_there_is_refused(command_line, tmp_path, verb):
    _assert_refused(command_line(*verb, tmp_path / "nowhere"), "nowhere")


def test_bad_query_image_is_told_in_the_results(reference, photos, command_line):
    result = command_line("search", reference, photos / "broken.jpg", photos / "coffee.jpg", "--json")
    assert result.returncode == 1
    assert '"state": "truncated"' in result.stdout
    assert "coffee" in result.stdout


def test_corrupt_file_is_one_row_and_the_exit_code_follows_the_tolerated_share(
    photos, reference, command_line
):
    status = parse(command_line("status", reference, "--json"))
    assert status["images"]["states"] == {"ok": status["images"]["planned"] - 1, "truncated": 1}
    listed = command_line("failures", reference)
    assert listed.stdout.count("\n") == 1
    assert "broken.jpg" in listed.stdout


def test_more_bad_images_than_tolerated_are_not_published(photos, command_line, tmp_path):
    options = [*tiny_options(), "--set", "publish.max_failed_share=0.0", "--workers", "0"]
    result = command_line("index", photos, tmp_path / "run", *options)
    assert result.returncode == 1
    assert "1 of 22 new images could not be used (1 truncated)" in result.stderr
    assert "max_failed_share" in result.stderr
    assert parse(command_line("status", tmp_path / "run", "--json"))["version"] is None
