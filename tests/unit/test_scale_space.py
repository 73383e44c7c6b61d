"""Octaves, the Hessian, extrema, and looking up points of all scales."""

from __future__ import annotations

import threading

import cv2
import numpy as np
import pytest
from dead_leaves import make_dead_leaves

from ckn_scale.core.scale_space import (
    BLUR_KERNELS,
    CHUNK,
    LEVEL_SIGMAS_PX,
    NUM_LEVELS,
    Buffers,
    ScaleSpace,
    build_scale_space,
    chunks,
    disk_window,
    locate_pixels,
    measure_hessian,
    plan_octaves,
)


def build(image: np.ndarray, *, saddles: bool = True) -> ScaleSpace:
    return build_scale_space(image, threshold=0.1, saddles=saddles)


def test_plan_octaves_by_hand() -> None:
    layout = plan_octaves(101, 200)
    assert layout.heights.tolist() == [101, 51, 26, 13]
    assert layout.widths.tolist() == [200, 100, 50, 25]
    assert layout.starts.tolist() == [0, 20200, 25300, 26600]
    assert layout.num_pixels == 26925
    assert layout.halved().heights.tolist() == [51, 26, 13, 7]


def test_layout_plane_is_a_view_of_its_octave() -> None:
    layout = plan_octaves(60, 40)
    flat = np.zeros(3 * layout.num_pixels, np.float32)
    layout.plane(flat, 1)[2] = 7
    assert layout.plane(flat, 1).shape == (3, 30, 20)
    assert flat.sum() == 7 * 30 * 20
    assert layout.plane(flat, 0).sum() == 0


def test_blur_kernels_add_up_to_the_levels() -> None:
    """Variances add: after kernel k the blur is that of level k, but for the cut window."""
    variances = []
    for kernel in BLUR_KERNELS:
        offsets = np.arange(len(kernel)) - len(kernel) // 2
        assert kernel.sum() == pytest.approx(1, abs=1e-6)
        variances.append((kernel[:, 0] * offsets**2).sum())
    np.testing.assert_allclose(np.sqrt(0.25 + np.cumsum(variances)), LEVEL_SIGMAS_PX, rtol=0.07)


def test_measure_hessian_of_a_paraboloid_by_hand() -> None:
    y, x = np.mgrid[-5:6, -5:6].astype(np.float32)
    out = np.empty((11, 11), np.float32)
    measure_hessian(1.5 * x * x + y * y + x * y, 2.0, False, out)  # H = (3 1; 1 2), det 5
    np.testing.assert_allclose(out[2:-2, 2:-2], 2.0**4 * 5, rtol=1e-5)
    measure_hessian(x * x - y * y, 1.0, False, out)
    np.testing.assert_allclose(out[2:-2, 2:-2], -4, rtol=1e-5)
    measure_hessian(x * x - y * y, 1.0, True, out)
    np.testing.assert_allclose(out[2:-2, 2:-2], 4, rtol=1e-5)


def test_extrema_are_maxima_of_their_neighbourhood() -> None:
    space = build(make_dead_leaves())
    extrema = space.extrema
    assert len(extrema) > 300
    assert set(extrema.levels) <= set(range(1, NUM_LEVELS - 1))
    for i in range(0, len(extrema), 17):
        planes = space.layout.plane(space.strengths, extrema.octaves[i])
        k, r, c = extrema.levels[i], extrema.rows[i], extrema.columns[i]
        cube = planes[k - 1 : k + 2, r - 1 : r + 2, c - 1 : c + 2]
        assert cube.shape == (3, 3, 3)
        assert cube.max() == cube[1, 1, 1] == extrema.strengths[i] > 0.1


def test_top_level_of_an_octave_is_close_to_the_measured_one() -> None:
    """It is enlarged from the next octave; a plain blur of the image to that scale says the same."""
    image = make_dead_leaves().astype(np.float32)
    enlarged = build(image, saddles=False)
    top = enlarged.layout.plane(enlarged.strengths, 0)[NUM_LEVELS - 1].copy()
    sigma = float(LEVEL_SIGMAS_PX[-1])
    measured = np.empty_like(top)
    measure_hessian(cv2.GaussianBlur(image, (0, 0), np.sqrt(sigma**2 - 0.25)), sigma, False, measured)
    inner = np.s_[20:-20, 20:-20]
    assert np.corrcoef(top[inner].ravel(), measured[inner].ravel())[0, 1] > 0.98


def test_disk_window_is_round_and_weighted() -> None:
    window = disk_window(radius=2.0, weight_sigma=1.0, side=5)
    assert window.positions.shape == (2, 13)  # |x| + … ≤ 2: the nodes of a disk of radius two
    assert window.weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(window.positions @ window.weights, 0, atol=1e-6)
    centre = np.flatnonzero(~window.positions.any(axis=0))[0]
    assert window.weights[centre] == window.weights.max()


def test_locate_pixels_by_hand() -> None:
    layout = plan_octaves(60, 40)
    window = disk_window(radius=1.0, weight_sigma=1.0, side=3)  # up, left, centre, right, down
    frames = np.array([[[2, 0, 10.4], [0, 2, 20.6]], [[8, 0, 0], [0, 8, 0]]], np.float32)
    index = locate_pixels(layout, np.array([0, 1]), np.array([1, 2], np.float32), frames, window)
    assert index[0].tolist() == [19 * 40 + 10, 21 * 40 + 8, 21 * 40 + 10, 21 * 40 + 12, 23 * 40 + 10]
    assert index[1].tolist() == [2400 + i for i in (0, 0, 0, 4, 4 * 20)]  # clipped at the corner


def test_locate_pixels_stays_inside_its_margin() -> None:
    layout = plan_octaves(30, 40)
    frames = np.random.default_rng(0).normal(scale=100, size=(50, 2, 3)).astype(np.float32)
    window = disk_window(radius=3.0, weight_sigma=1.0, side=5)
    octaves = np.zeros(50, int)
    index = locate_pixels(layout, octaves, np.ones(50, np.float32), frames, window, margin_px=1)
    row, column = np.divmod(index, 40)
    assert row.min() == column.min() == 1
    assert (row.max(), column.max()) == (28, 38)


@pytest.mark.parametrize("num_points", [0, 1, CHUNK, CHUNK + 1, 1000])
def test_chunks_cover_all_points_once(num_points: int) -> None:
    covered = [i for part in chunks(num_points) for i in range(num_points)[part]]
    assert covered == list(range(num_points))


def test_buffers_reuse_memory_within_a_thread_only() -> None:
    buffers = Buffers()
    first = buffers.take("a", 10, 10)
    assert np.shares_memory(first, buffers.take("a", 5, 5))
    assert not np.shares_memory(first, buffers.take("b", 5, 5))
    assert buffers.take("a", 20, 20).shape == (20, 20)
    assert buffers.take("flags", 4, dtype=np.bool_).dtype == np.bool_
    elsewhere: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: elsewhere.append(buffers.take("b", 5, 5)))
    thread.start()
    thread.join()
    assert not np.shares_memory(elsewhere[0], buffers.take("b", 5, 5))
