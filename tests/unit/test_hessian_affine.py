"""What the detector promises: found again after rotation, scaling and tilt; deterministic; bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from dead_leaves import make_dead_leaves, warp_image

from ckn_scale.core.hessian_affine import (
    NUM_BINS,
    Points,
    detect_hessian_affine,
    estimate_frames,
    fit_quadratic,
    is_blob,
    orient_frames,
    peak_angles,
    refine_extrema,
    solve_symmetric,
    turn_frames,
    upright_shapes,
)
from ckn_scale.core.scale_space import (
    ScaleSpace,
    build_scale_space,
    plan_octaves,
)
from ckn_scale.core.specs import KeypointSpec
from ckn_scale.evaluate.matching import centres_inside, overlap_regions, pair_regions, project_frames


def rotation(angle_deg: float) -> np.ndarray:
    cos, sin = np.cos(np.radians(angle_deg)), np.sin(np.radians(angle_deg))
    return np.array([[cos, -sin], [sin, cos]])


def warp_about_centre(image: np.ndarray, shape: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    height, width = image.shape
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    homography = np.eye(3)
    homography[:2, :2], homography[:2, 2] = shape, centre - shape @ centre
    return warp_image(image, homography, (width, height)), homography


def draw_blob(sigma_px: tuple[float, float], angle_deg: float = 0.0) -> np.ndarray:
    """A dark Gaussian blob at (60.25, 58.5) with these half axes."""
    y, x = np.mgrid[:121, :121]
    along = rotation(-angle_deg) @ np.stack([x.ravel() - 60.25, y.ravel() - 58.5])
    distance_sq = (along[0] / sigma_px[0]) ** 2 + (along[1] / sigma_px[1]) ** 2
    return (200 - 150 * np.exp(-0.5 * distance_sq)).reshape(121, 121).astype(np.float32)


@pytest.mark.parametrize("sigma_px", [2.5, 4.0, 7.0, 12.0])
def test_blob_is_found_at_its_centre_and_scale(sigma_px: float) -> None:
    strongest = detect_hessian_affine(draw_blob((sigma_px, sigma_px)), KeypointSpec(max_keypoints=1))
    np.testing.assert_allclose(strongest.frames[0, :, 2], [60.25, 58.5], atol=0.15)
    # The scale-normalised determinant of a Gaussian of σ₀ peaks where the smoothing has σ₀ itself.
    assert strongest.scales_px[0] == pytest.approx(sigma_px, rel=0.15)


@pytest.mark.parametrize("angle_deg", [0, 30, 90, 135])
def test_elongated_blob_gives_an_ellipse_along_it(angle_deg: float) -> None:
    keypoints = detect_hessian_affine(draw_blob((9, 5), angle_deg), KeypointSpec(max_keypoints=1))
    axes, lengths, _ = np.linalg.svd(keypoints.frames[0, :, :2])
    direction = rotation(angle_deg) @ [1, 0]
    assert abs(axes[:, 0] @ direction) > 0.97
    assert 1.25 < lengths[0] / lengths[1] < 2.2


@pytest.mark.parametrize(
    ("shape", "at_least"),
    [
        (rotation(37), 0.75),
        (0.7 * rotation(10), 0.65),
        (1.3 * np.eye(2), 0.7),
        (rotation(20) @ np.diag([1, 1 / 1.5]), 0.6),
        (rotation(-50) @ np.diag([1, 1 / 2.0]), 0.5),
    ],
    ids=["37 degrees", "smaller", "larger", "tilt 1.5", "tilt 2"],
)
def test_regions_are_found_again(shape: np.ndarray, at_least: float) -> None:
    image = make_dead_leaves()
    warped, homography = warp_about_centre(image, shape)
    spec = KeypointSpec(max_keypoints=200)
    first, second = (detect_hessian_affine(i, spec).frames for i in (image, warped))
    first = first[centres_inside(project_frames(first, homography), *warped.shape)]
    second = second[centres_inside(project_frames(second, np.linalg.inv(homography)), *image.shape)]
    pairs = pair_regions(project_frames(first, homography), second)
    assert len(pairs[0]) >= at_least * min(len(first), len(second))


def test_quarter_turn_gives_the_same_regions() -> None:
    """257 pixels halve evenly from either end, so nothing but rounding tells the two images apart."""
    image = make_dead_leaves(257, 257)
    turn = np.array([[0.0, 1, 0], [-1, 0, 256], [0, 0, 1]])  # what np.rot90 does to (x, y)
    spec = KeypointSpec(max_keypoints=200)
    first = project_frames(detect_hessian_affine(image, spec).frames, turn)
    second = detect_hessian_affine(np.rot90(image).copy(), spec).frames
    assert len(pair_regions(first, second, min_overlap=0.95)[0]) >= 198


def test_orientation_turns_with_the_image() -> None:
    """The frame of a region found in both images is the same frame, not only the same ellipse."""
    image = make_dead_leaves(seed=3)
    warped, homography = warp_about_centre(image, rotation(65))
    spec = KeypointSpec(max_keypoints=200)
    first, second = (detect_hessian_affine(i, spec).frames for i in (image, warped))
    projected = project_frames(first, homography)
    i, j = pair_regions(projected, second, min_overlap=0.7)
    angle = [np.arctan2(f[:, 1, 0], f[:, 0, 0]) for f in (projected[i], second[j])]
    turned = np.abs(np.angle(np.exp(1j * (angle[0] - angle[1]))))
    assert np.median(turned) < np.radians(12)
    assert np.mean(turned < np.radians(30)) > 0.75


def test_gravity_keeps_the_vertical_axis() -> None:
    frames = detect_hessian_affine(make_dead_leaves(), KeypointSpec(orientation="gravity")).frames
    assert not frames[:, 0, 1].any()
    assert (frames[:, 1, 1] > 0).all()


def test_gravity_and_dominant_find_the_same_ellipses() -> None:
    image = make_dead_leaves()
    upright = detect_hessian_affine(image, KeypointSpec(orientation="gravity"))
    turned = detect_hessian_affine(image, KeypointSpec(orientation="dominant"))
    overlap = overlap_regions(upright.frames.astype(float), turned.frames.astype(float))
    np.testing.assert_allclose(overlap, 1, atol=1e-2)
    np.testing.assert_array_equal(upright.responses, turned.responses)


def test_strongest_first_and_at_most_max_keypoints() -> None:
    image = make_dead_leaves()
    many = detect_hessian_affine(image, KeypointSpec(max_keypoints=300))
    few = detect_hessian_affine(image, KeypointSpec(max_keypoints=20))
    assert len(many) == 300
    assert len(few) == 20
    assert (np.diff(many.responses) <= 0).all()
    np.testing.assert_allclose(few.responses, many.responses[:20], rtol=1e-6)


def test_threshold_bounds_from_below() -> None:
    image = make_dead_leaves()
    everything = detect_hessian_affine(image, KeypointSpec(max_keypoints=100_000))
    strong = detect_hessian_affine(image, KeypointSpec(max_keypoints=100_000, threshold=500))
    assert 0 < len(strong) < len(everything)


def test_poor_contrast_still_gets_points() -> None:
    faint = (120 + make_dead_leaves() * (12 / 255)).astype(np.uint8)
    assert len(detect_hessian_affine(faint, KeypointSpec(max_keypoints=100))) == 100


def test_saddles_off_leaves_blobs_only() -> None:
    """A checkerboard has a saddle at every corner and a blob in every square."""
    board = np.kron(np.indices((8, 8)).sum(axis=0) % 2, np.ones((16, 16))).astype(np.uint8) * 200
    corners = (np.indices((7, 7)).reshape(2, -1).T + 1) * 16 - 0.5

    def corners_found(saddles: bool) -> int:
        spec = KeypointSpec(max_keypoints=400, saddles=saddles)
        centres = detect_hessian_affine(board, spec).frames[:, :, 2]
        return sum((np.abs(centres - corner).max(axis=1) < 2).any() for corner in corners)

    assert corners_found(saddles=True) == 49
    assert corners_found(saddles=False) == 0


def test_scale_weight_prefers_large_regions() -> None:
    image = make_dead_leaves()
    scales = [
        np.median(detect_hessian_affine(image, KeypointSpec(max_keypoints=100, scale_weight=w)).scales_px)
        for w in (0.0, 1.0, 2.0)
    ]
    assert scales[0] < scales[1] < scales[2]


@pytest.mark.parametrize("value", [0, 90, 255])
def test_flat_image_has_none(value: int) -> None:
    keypoints = detect_hessian_affine(np.full((100, 130), value, np.uint8), KeypointSpec())
    assert keypoints.frames.shape == (0, 2, 3)


def test_linear_ramp_has_none() -> None:
    ramp = np.broadcast_to(np.arange(0, 200, dtype=np.float32), (150, 200)).copy()
    assert len(detect_hessian_affine(ramp, KeypointSpec())) == 0


@pytest.mark.parametrize("shape", [(0, 0), (0, 50), (1, 1), (1, 20_000), (4, 3), (5, 5), (13, 400)])
def test_tiny_and_narrow_images_do_not_fail(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    keypoints = detect_hessian_affine(image, KeypointSpec())
    assert np.isfinite(keypoints.frames).all()
    assert (keypoints.scales_px > 0).all()


def test_same_input_same_bytes() -> None:
    image = make_dead_leaves()
    first = detect_hessian_affine(image, KeypointSpec())
    detect_hessian_affine(
        make_dead_leaves(300, 200, seed=9), KeypointSpec()
    )  # leaves other values in the buffers
    again = detect_hessian_affine(image, KeypointSpec())
    assert first.frames.tobytes() == again.frames.tobytes()
    assert first.responses.tobytes() == again.responses.tobytes()


def test_image_is_not_changed() -> None:
    image = make_dead_leaves()
    before = image.copy()
    detect_hessian_affine(image, KeypointSpec())
    np.testing.assert_array_equal(image, before)


def test_threads_give_the_same_results() -> None:
    images = [make_dead_leaves(120 + 20 * (k % 3), 160, seed=k) for k in range(6)]
    spec = KeypointSpec(max_keypoints=100)
    alone = [detect_hessian_affine(image, spec).frames for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda k: detect_hessian_affine(images[k % 6], spec).frames, range(36)))
    for k, frames in enumerate(together):
        np.testing.assert_array_equal(frames, alone[k % 6])


def test_opencv_threads_do_not_change_the_result() -> None:
    image = make_dead_leaves(400, 500)
    before = cv2.getNumThreads()
    results = []
    try:
        for num_threads in (1, 2):
            cv2.setNumThreads(num_threads)
            results.append(detect_hessian_affine(image, KeypointSpec()).frames)
    finally:
        cv2.setNumThreads(before)
    np.testing.assert_array_equal(results[0], results[1])


def test_views_and_float_images_are_taken() -> None:
    image = make_dead_leaves()
    spec = KeypointSpec(max_keypoints=50)
    plain = detect_hessian_affine(image, spec).frames
    np.testing.assert_allclose(detect_hessian_affine(image.astype(np.float32), spec).frames, plain, atol=1e-3)
    strided = np.repeat(image, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(detect_hessian_affine(strided, spec).frames, plain)


@pytest.mark.parametrize("image", [np.zeros((9, 9, 3), np.uint8), np.zeros((9, 9)), np.zeros(9, np.uint8)])
def test_other_arrays_are_refused(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match="luma must be"):
        detect_hessian_affine(image, KeypointSpec())


def build(image: np.ndarray, *, saddles: bool = True) -> ScaleSpace:
    return build_scale_space(image, threshold=0.1, saddles=saddles)


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
