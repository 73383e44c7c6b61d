"""What the detector promises: found again after rotation, scaling and tilt; deterministic; bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from dead_leaves import make_dead_leaves, warp_image

from ckn_scale.core.hessian_affine import detect_hessian_affine
from ckn_scale.core.regions import centres_inside, overlap_regions, pair_regions, project_frames
from ckn_scale.core.specs import KeypointSpec


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
