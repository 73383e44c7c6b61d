"""The detectors that benchmarks/detector.py compares, each behind the same few calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np

from ckn_scale.core.hessian_affine import detect_hessian_affine
from ckn_scale.core.patches import extract_patches
from ckn_scale.core.specs import KeypointSpec, PatchSpec

PATCH_PX = 51
HESAFF_REGION = 3.0 * 3.0**0.5  # pyhesaff's keypoints are this much larger than their scale
KORNIA_REGION = 6.0  # its default: what its shape and orientation windows are cut at


@dataclass(frozen=True)
class Task:
    """One rival on one image: what is compared, what is timed."""

    find_frames: Callable[[], np.ndarray]
    detect: Callable[[], object]
    cut_patches: Callable[[], object] | None = None


Rival = Callable[[np.ndarray, int], Task]


def prepare_ours(image: np.ndarray, num_points: int, scale_weight: float = 1.0) -> Task:
    spec = KeypointSpec(max_keypoints=num_points, scale_weight=scale_weight)
    patch_spec = PatchSpec(size_px=PATCH_PX, region=HESAFF_REGION)
    keypoints = detect_hessian_affine(image, spec)
    return Task(
        lambda: detect_hessian_affine(image, spec).frames,
        lambda: detect_hessian_affine(image, spec),
        lambda: extract_patches(image, keypoints, patch_spec),
    )


def prepare_pyhesaff(image: np.ndarray, num_points: int) -> Task:
    """It reports no response, so the threshold for the wanted number is searched for, outside the clock.

    Its detection always describes the points too; counting does all of it but that, and is timed.
    """
    import pyhesaff

    threshold = _search_threshold(
        lambda t: pyhesaff.detect_num_feats_in_image(image, threshold=t), num_points
    )
    keypoints, _ = pyhesaff.detect_feats_in_image(image, threshold=threshold)
    frames = np.zeros((len(keypoints), 2, 3))
    frames[:, :, 2] = keypoints[:, :2]
    frames[:, 0, 0], frames[:, 1, 0], frames[:, 1, 1] = (keypoints[:, 2:5] / HESAFF_REGION).T
    return Task(
        lambda: frames,
        lambda: pyhesaff.detect_num_feats_in_image(image, threshold=threshold),
        lambda: pyhesaff.extract_patches(image, keypoints, patchSize=PATCH_PX),
    )


def _search_threshold(count: Callable[[float], int], wanted: int) -> float:
    low, high = 0.05, 60.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        found = count(middle)
        if abs(found - wanted) <= 0.005 * wanted:
            break
        low, high = (middle, high) if found > wanted else (low, middle)
    return middle


def prepare_kornia(image: np.ndarray, num_points: int) -> Task:
    import kornia.feature as kf
    import torch
    from kornia.geometry import ScalePyramid

    torch.set_num_threads(1)
    detector = kf.ScaleSpaceDetector(
        num_points,
        resp_module=kf.BlobHessian(),
        scale_pyr_module=ScalePyramid(3, 1.6, 32),
        ori_module=kf.LAFOrienter(19),
        aff_module=kf.LAFAffineShapeEstimator(19),
        mr_size=KORNIA_REGION,
        minima_are_also_good=True,
    )
    tensor = torch.from_numpy(image)[None, None].float() / 255

    def detect() -> np.ndarray:
        with torch.no_grad():
            frames = detector(tensor)[0][0].numpy().astype(np.float64)
        frames[:, :, :2] /= KORNIA_REGION
        return frames

    return Task(detect, detect)


def prepare_sift(image: np.ndarray, num_points: int) -> Task:
    sift = cv2.SIFT.create(num_points)

    def find_frames() -> np.ndarray:
        keypoints = sift.detect(image)
        frames = np.zeros((len(keypoints), 2, 3))
        frames[:, :, 2] = [k.pt for k in keypoints]
        frames[:, 0, 0] = frames[:, 1, 1] = [k.size / 2 for k in keypoints]
        return frames

    return Task(find_frames, lambda: sift.detect(image))


RIVALS: dict[str, Rival] = {
    "ours": prepare_ours,
    "ours, plain": partial(prepare_ours, scale_weight=0.0),  # ranked by response alone, as the others are
    "pyhesaff": prepare_pyhesaff,
    "kornia": prepare_kornia,
    "OpenCV SIFT": prepare_sift,
}
