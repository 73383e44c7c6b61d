from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.core.augmentations import VIEWS, render_view
from ckn_scale.core.images import decode_jpeg, encode_jpeg


@pytest.fixture
def image():
    return np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)


@pytest.mark.parametrize("name", VIEWS)
def test_render_view_is_rgb_bytes_that_differ_from_the_image(image, name):
    before = image.copy()
    view = render_view(image, name, seed=3)
    assert view.dtype == np.uint8
    assert view.shape[2] == 3
    assert view.shape != image.shape or not np.array_equal(view, image)
    assert np.array_equal(image, before)


@pytest.mark.parametrize("name", VIEWS)
def test_render_view_is_a_function_of_its_seed(image, name):
    assert np.array_equal(render_view(image, name, 3), render_view(image, name, 3))
    other = render_view(image, name, 4)
    same = render_view(image, name, 3)
    assert other.shape != same.shape or not np.array_equal(other, same)


@pytest.mark.parametrize("name", VIEWS)
def test_render_view_takes_an_image_of_one_pixel(name):
    assert render_view(np.full((1, 1, 3), 7, np.uint8), name, 0).size >= 3


def test_render_view_refuses_an_unknown_name(image):
    with pytest.raises(ValueError, match="no view named 'tlit'"):
        render_view(image, "tlit", 0)


def test_encode_jpeg_comes_back_alike():
    flat = np.full((16, 16, 3), (200, 30, 60), np.uint8)
    assert np.abs(decode_jpeg(encode_jpeg(flat, 95)).astype(int) - flat).max() <= 4


def test_decode_jpeg_refuses_other_bytes():
    with pytest.raises(ValueError, match="not a JPEG"):
        decode_jpeg(b"nothing")


@pytest.mark.parametrize("shape", [(100, 100), (80, 120), (120, 80), (60, 240)])
def test_turned_view_shows_no_border(shape):
    """The outermost pixels are black: behind them a view would show nothing but black."""
    image = np.full((*shape, 3), 200, np.uint8)
    image[0], image[-1], image[:, 0], image[:, -1] = 0, 0, 0, 0
    for seed in range(60):
        assert render_view(image, "turn", seed).min() > 0, seed
