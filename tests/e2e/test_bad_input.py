"""Bad input: one clear line, exit code 2, nothing half-written. And honest exit codes for bad images."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from photo_runs import index_command, parse, tiny_options


def _assert_refused(result, *words):
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" …")]  # what was begun
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


VERBS = ["status", "failures", "gc", "encode", "serve"]


@pytest.mark.parametrize("words", [[verb] for verb in VERBS] + [["search", "query.jpg"]])
def test_file_in_place_of_a_run_is_refused(command_line, tmp_path, words):
    (tmp_path / "file").write_text("no run")
    verb, *rest = words
    _assert_refused(command_line(verb, tmp_path / "file", *rest), "file", "a folder is needed")


@pytest.mark.parametrize(
    ("run", "words"),
    [("file", "a folder is needed"), ("file/run", "a folder is needed"), ("a" * 300, "too long")],
)
def test_run_that_cannot_be_made_is_refused(photos, command_line, tmp_path, run, words):
    (tmp_path / "file").write_text("no folder")
    _assert_refused(command_line("index", photos, tmp_path / run, *tiny_options()), run, words)


def test_folder_that_cannot_be_made_is_refused(photos, command_line):
    _assert_refused(command_line("index", photos, "/proc/run", *tiny_options()), "/proc/run")


def test_read_only_run_is_read_and_not_written(reference, photos, command_line, tmp_path):
    """Read-only as a mount is, which binds root too."""
    run = tmp_path / "run"
    run.mkdir()
    for options in (["--bind", reference, run], ["-o", "remount,ro,bind", run]):
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        assert command_line("status", run).returncode == 0
        assert command_line("search", run, photos / "coffee.jpg").returncode == 0
        refused = command_line("index", photos, run, *tiny_options())
        _assert_refused(refused, str(run), "read-only")
    finally:
        subprocess.run(["umount", "-l", run], check=True)


def test_closed_pipe_is_no_error(reference, user_env):
    """As in `ckn-scale digest run/ | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = index_command("digest", reference)
    result = subprocess.run(command, env=user_env, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


def test_full_output_is_told(reference, user_env):
    with open("/dev/full", "w") as full:
        command = index_command("digest", reference)
        result = subprocess.run(command, env=user_env, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert result.returncode == 2
    assert result.stderr == b"ckn-scale: No space left on device\n"


def test_name_that_is_not_utf8_is_told(reference, command_line):
    result = command_line("search", reference, b"caf\xe9.jpg".decode(errors="surrogateescape"))
    assert result.returncode == 1
    assert "caf\\udce9.jpg" in result.stdout
    assert "Traceback" not in result.stderr


def test_wrong_use_is_one_line_that_names_the_help(command_line, tmp_path):
    _assert_refused(command_line("status", tmp_path, "--nope"), "--nope", "ckn-scale status --help")
    _assert_refused(command_line("index", tmp_path), "RUN", "ckn-scale index --help")


def test_demo_leaves_a_folder_alone_that_is_not_its_own(command_line, tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    _assert_refused(command_line("demo", "--folder", tmp_path, "--once"), "holiday.jpg")
    assert (tmp_path / "holiday.jpg").exists()


@pytest.mark.parametrize("verb", [["index", "photos", "run"], ["search", "run", "a.jpg"], ["serve", "run"]])
def test_first_line_comes_before_torch_and_ray_are_imported(user_env, tmp_path, verb):
    call = "import sys; from ckn_scale.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-X", "importtime", "-c", call, *verb]
    result = subprocess.run(command, env=user_env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    before, said, _ = result.stderr.partition(" …\n")
    assert said
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in before.splitlines()}
    assert "typer" in imported
    assert imported.isdisjoint({"torch", "ray", "cv2", "faiss"})


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
