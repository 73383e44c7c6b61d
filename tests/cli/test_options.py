from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from ckn_scale.cli.main import app
from ckn_scale.cli.options import SettingsOptions, WorkerOptions, spread_options
from ckn_scale.errors import SettingsError


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(help="In pixels.")] = 3
    name: Annotated[list[str] | None, typer.Option("--name")] = None


@pytest.fixture
def call():
    """A verb with a group between its own arguments; what it was called with."""
    program, calls = typer.Typer(), []

    @program.command()
    @spread_options
    def draw(
        path: Annotated[str, typer.Argument()],
        *,
        quick: Annotated[bool, typer.Option("--quick")] = False,
        size: Size,
    ) -> None:
        """Draw it."""
        calls.append((path, quick, size))

    def invoke(*arguments):
        result = CliRunner().invoke(program, list(arguments))
        return result, calls[-1] if calls else None

    return invoke


def test_spread_options_gathers_the_fields_into_their_group(call):
    assert call("a.png", "--width", "7", "--name", "x", "--name", "y")[1] == (
        "a.png",
        False,
        Size(7, ["x", "y"]),
    )


def test_spread_options_keeps_defaults_and_help(call):
    result, called = call("a.png", "--quick")
    assert result.exit_code == 0
    assert called == ("a.png", True, Size())
    text = call("--help")[0].output
    assert "Draw it." in text
    assert "In pixels." in text


def test_spread_options_refuses_a_bad_value_of_a_group(call):
    result, called = call("a.png", "--width", "wide")
    assert (result.exit_code, called) == (2, None)


def test_settings_are_loaded_with_later_values_over_earlier(tmp_path):
    (tmp_path / "own.toml").write_text("[vlad]\nnum_words = 4\n[keypoints]\nmax_keypoints = 40\n")
    options = SettingsOptions("tiny", str(tmp_path / "own.toml"), ["vlad.num_words=5"])
    assert options.load().vlad.num_words == 5
    assert options.load().keypoints.max_keypoints == 40
    assert options.load("vlad.num_words=6").vlad.num_words == 6
    other = options.load(preset="paper")
    assert other.vlad.num_words == 5
    assert other.channels != options.load().channels


def test_workers_of_a_bad_size_are_refused():
    with pytest.raises(SettingsError, match="gpus_per_worker"):
        WorkerOptions(gpus_per_worker=0.0).resources()


@pytest.mark.parametrize(
    ("option", "address"), [([], None), (["--ray", "local"], None), (["--ray", "auto"], "auto")]
)
def test_serve_starts_a_ray_of_its_own_unless_told_to_join_one(monkeypatch, option, address):
    asked = []
    monkeypatch.setattr(
        "ckn_scale.serving.app.serve_run", lambda run, **options: asked.append(options["ray_address"])
    )
    result = CliRunner().invoke(app, ["serve", "run", *option])
    assert (result.exit_code, asked) == (0, [address])
