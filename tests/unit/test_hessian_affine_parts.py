"""The steps of the detector, each against values worked out by hand."""

from __future__ import annotations

import threading

import cv2
import numpy as np
import pytest
from dead_leaves import make_dead_leaves

from ckn_scale.core.hessian_affine import (
    Points,
    estimate_frames,
    fit_quadratic,
    is_blob,
    refine_extrema,
    solve_symmetric,
    upright_shapes,
)
from ckn_scale.core.orientation import NUM_BINS, orient_frames, peak_angles, turn_frames
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


def test_fit_quadratic_recovers_a_quadratic() -> None:
    z, y, x = np.mgrid[-1:2, -1:2, -1:2].astype(float)
    values = 2 * x - 3 * y + z - 4 * x * x - 3 * y * y - 2 * z * z + x * y + 0.5 * x * z - y * z
    gradient, hessian = fit_quadratic(values[..., None])
    np.testing.assert_allclose(gradient[:, 0], np.array([2, -3, 1]))
    expected = np.array([[-8, 1, 0.5], [1, -6, -1], [0.5, -1, -4]])
    np.testing.assert_allclose(hessian[..., 0], expected)


def test_solve_symmetric_agrees_with_numpy() -> None:
    rng = np.random.default_rng(0)
    half = rng.normal(size=(50, 3, 3))
    matrices, right = half + half.transpose(0, 2, 1), rng.normal(size=(50, 3))
    expected = np.linalg.solve(matrices, right[..., None])[..., 0]
    np.testing.assert_allclose(solve_symmetric(matrices.transpose(1, 2, 0), right.T).T, expected, rtol=1e-6)


def test_solve_symmetric_of_a_singular_matrix_is_finite() -> None:
    assert np.isfinite(solve_symmetric(np.zeros((3, 3, 2)), np.ones((3, 2)))).all()


def test_is_blob_refuses_edges_and_saddles() -> None:
    curvatures = [(-1, -1), (-10, -1.1), (-10, -0.9), (-1, 1), (-1, 0)]
    hessian = np.zeros((3, 3, len(curvatures)))
    hessian[0, 0], hessian[1, 1] = np.array(curvatures).T
    assert is_blob(hessian).tolist() == [True, True, False, False, False]


def test_refine_extrema_moves_less_than_a_pixel() -> None:
    space = build(make_dead_leaves())
    points = refine_extrema(space, space.extrema)
    assert 0 < len(points) < len(space.extrema)
    step_px = 2.0**points.octaves
    assert ((points.sigma_px / step_px > 1.5) & (points.sigma_px / step_px < 5.1)).all()
    assert np.isfinite(points.responses).all()


def test_refine_extrema_of_none() -> None:
    space = build(np.zeros((50, 50), np.uint8))
    assert len(space.extrema) == 0
    assert len(refine_extrema(space, space.extrema)) == 0


def test_upright_shapes_invert_the_tensor() -> None:
    """A Aᵀ is the inverse of the tensor with its diagonal raised, up to the determinant of 1."""
    moments = np.array([[4, 1, 2], [1, 0, 1], [100, 0, 0]], float)
    shapes = upright_shapes(moments)
    assert not shapes[:, 0, 1].any()
    np.testing.assert_allclose(np.linalg.det(shapes), 1, rtol=1e-6)
    raised = np.array([[4.6, 1], [1, 2.6]])
    expected = np.linalg.inv(raised) * np.sqrt(np.linalg.det(raised))
    np.testing.assert_allclose(shapes[0] @ shapes[0].T, expected, rtol=1e-5)
    np.testing.assert_allclose(shapes[1], np.eye(2), atol=1e-6)
    ratio = np.linalg.cond(shapes[2])  # the most an edge can give
    assert ratio == pytest.approx(np.sqrt(11), rel=1e-3)


def test_upright_shapes_of_no_gradient_is_a_circle() -> None:
    np.testing.assert_allclose(upright_shapes(np.zeros((1, 4))), [np.eye(2)], atol=1e-6)


def test_estimate_frames_keeps_position_and_scale() -> None:
    image = make_dead_leaves()
    x, y, sigma = (np.array(v, np.float32) for v in ([40.5, 200], [100, 33.25], [2.5, 9]))
    points = Points(np.array([0, 2]), x, y, sigma, np.ones(2, np.float32))
    frames = estimate_frames(image, plan_octaves(*image.shape), points)
    np.testing.assert_array_equal(frames[:, :, 2], np.stack([x, y], axis=1))
    np.testing.assert_allclose(np.linalg.det(frames[:, :, :2]), sigma**2, rtol=1e-4)


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


def test_peak_angles_of_one_direction() -> None:
    histograms = np.zeros((2, NUM_BINS))
    histograms[0, NUM_BINS // 4] = 1  # 90 degrees
    histograms[1, [-1, 0]] = 1  # between the last bin and the first
    np.testing.assert_allclose(
        np.degrees(peak_angles(histograms)) % 360, [90, 360 - 180 / NUM_BINS], atol=0.01
    )


def test_peak_angles_of_nothing_is_zero() -> None:
    assert peak_angles(np.zeros((1, NUM_BINS))).tolist() == [0]


def test_turn_frames_by_hand() -> None:
    frame = np.array([[[2, 0, 7], [1, 3, 8]]], np.float32)
    turned = turn_frames(frame, np.array([np.pi / 2], np.float32))[0]
    np.testing.assert_allclose(turned, [[0, -2, 7], [3, -1, 8]], atol=1e-6)


@pytest.mark.parametrize("angle_deg", [0, 45, 100, 200, 333])
def test_orient_frames_follows_a_ramp(angle_deg: float) -> None:
    y, x = np.mgrid[:80, :80].astype(np.float32)
    angle = np.radians(angle_deg)
    space = build((np.cos(angle) * x + np.sin(angle) * y).astype(np.float32))
    frames = np.array([[[3, 0, 40], [0, 3, 40]]], np.float32)
    axis = orient_frames(space, np.array([0]), frames)[0, :, 0] / 3
    assert np.degrees(np.arccos(np.clip(axis @ [np.cos(angle), np.sin(angle)], -1, 1))) < 3


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
