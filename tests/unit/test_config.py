from __future__ import annotations

import pytest
from pydantic import ValidationError

from ckn_scale.config import list_presets, load_settings, parse_resources, parse_settings
from ckn_scale.core.ckn_model import layer_sides
from ckn_scale.core.specs import VladSpec
from ckn_scale.errors import SettingsError


@pytest.mark.parametrize("preset", list_presets())
def test_load_settings_of_every_preset_survives_json(preset):
    settings = load_settings(preset)
    assert parse_settings(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("preset", list_presets())
def test_networks_of_every_preset_give_what_their_projections_take(preset):
    settings = load_settings(preset)
    for channel in settings.channels:
        side = layer_sides(channel.ckn, settings.patches.size_px)[-1][1]
        assert side**2 * channel.ckn.layers[-1].num_filters >= channel.projection.dim


def test_load_settings_lays_file_over_preset_and_set_over_both(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[vlad]\nnum_words = 20\nseed = 5\n")
    settings = load_settings("tiny", str(path), ["vlad.num_words=24", "channels.0.projection.dim=8"])
    assert (settings.vlad.num_words, settings.vlad.seed) == (24, 5)
    assert settings.channels[0].projection.dim == 8
    assert settings.channels[0].ckn.channel == "grad"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("vlad.num_word=3", "unknown setting 'vlad.num_word'"),
        ("channels.0.ckn.lyers=3", "unknown setting"),
        ("nothing.at_all=3", "unknown setting 'nothing'"),
        ("patches.size_px=5", "size_px must be ≥ 8, got 5"),
        ("channels.3.projection.dim=8", "not a position from 0 to 2"),
        ("numerics.device=tpu", "numerics.device"),
        ("publish.target=1.5", "publish.target"),
        ("reduction.method=whiten", "reduction.method"),
        (
            'points.channels=["sift"]',
            "points.channels names 'sift', but the channels of images are grad, white",
        ),
        ("points.dim=100", "points: dim must be a multiple of 8, got 100"),
        ("points.num_words=70000", "num_words must be ≤ 65536, got 70000"),
        ('points.channels=["grad", "grad"]', "each once"),
        ("channels.1.max_points=0", "max_points must be ≥ 1, got 0"),
        (
            "encode.max_descriptors=500",
            "unknown setting 'encode.max_descriptors': it is 'points.max_points' now",
        ),
        ("=3", "key.path=value"),
        ("vlad.num_words.more=3", "holds a value"),
    ],
)
def test_load_settings_refuses_in_one_line_with_the_value(override, sentence):
    with pytest.raises(SettingsError, match=sentence) as caught:
        load_settings("tiny", None, [override])
    assert "\n" not in str(caught.value)


def test_load_settings_refuses_files_that_are_missing_or_no_toml(tmp_path):
    with pytest.raises(SettingsError, match="no such settings file"):
        load_settings("tiny", str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[vlad")
    with pytest.raises(SettingsError, match="is not TOML"):
        load_settings("tiny", str(tmp_path / "bad.toml"))


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load_settings("tiny").vlad = None


def test_parse_resources_refuses_what_it_does_not_know():
    assert parse_resources({"workers": 0, "ray": None}).workers == 0
    with pytest.raises(SettingsError, match="ray"):
        parse_resources({"ray": "ray://somewhere"})
    with pytest.raises(SettingsError, match="workers"):
        parse_resources({"workers": -1})


def test_words_that_do_not_fit_their_stored_form_are_refused():
    """They are stored as uint16: word 65,536 would come back as word 0."""
    assert VladSpec(num_words=65_536).num_words == 65_536
    with pytest.raises(ValueError, match="num_words must be ≤ 65536, got 65537"):
        VladSpec(num_words=65_537)
