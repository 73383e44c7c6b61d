"""What is computed, as plain frozen dataclasses: the only place where these settings are written.

`config.py` nests them as they are (pydantic validates them and refuses unknown keys), core
functions take them as arguments. No torch, no numpy here: `ckn-scale --help` imports this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

MAX_WORDS = 65_536  # the words of descriptors are stored as uint16
BYTES_PER_FRAME, BYTES_PER_WORD = 9, 2  # of a stored point
WORDS_PER_IMAGE = DESCRIPTORS_PER_WORD = 12  # of the sample that the words of points are learned from
# So many words were measured on hundreds of images. More make chance rarer and matching cheaper, which counts
# among millions, and ask for as many images, so that they are words of more than these.
USUAL_WORDS = 4096
CLOSED: dict[str, Any] = {"extra": "forbid"}  # read by pydantic: a misspelt key is an error


def _at_least(spec: object, **bounds: float) -> None:
    for name, bound in bounds.items():
        value = getattr(spec, name)
        if value < bound:
            raise ValueError(f"{name} must be ≥ {bound}, got {value}")


@dataclass(frozen=True)
class ImageSpec:
    """How a file becomes pixels."""

    __pydantic_config__ = CLOSED

    max_pixels: int = 786_432  # larger images are scaled down to this area
    min_side_px: int = 128  # smaller images are scaled up to this shorter side (at most 4 ×)
    pixel_cap: int = 100_000_000  # refused from the header alone, before decoding
    exif_orientation: bool = True

    def __post_init__(self) -> None:
        _at_least(self, max_pixels=1024, min_side_px=1, pixel_cap=1024)


@dataclass(frozen=True)
class KeypointSpec:
    """Which regions are described."""

    __pydantic_config__ = CLOSED

    detector: Literal["hessian-affine", "dense"] = "hessian-affine"
    max_keypoints: int = 800  # the strongest are kept
    threshold: float = 0.1  # the response below which nothing counts, however few points there are
    scale_weight: float = 1.0  # ranked by response · scale^this: large ones are found again more often
    orientation: Literal["dominant", "gravity"] = "dominant"
    saddles: bool = True  # negative extrema of the Hessian's determinant too
    dense_step_px: int = 8
    dense_num_scales: int = 5  # √2 apart

    def __post_init__(self) -> None:
        _at_least(self, max_keypoints=1, threshold=0, dense_step_px=1, dense_num_scales=1)


@dataclass(frozen=True)
class PatchSpec:
    """How a region becomes a square of pixels."""

    __pydantic_config__ = CLOSED

    size_px: int = 51
    region: float = 12.0  # half side of the patch, in units of the keypoint's scale

    def __post_init__(self) -> None:
        _at_least(self, size_px=8, region=0.5)


@dataclass(frozen=True)
class LayerSpec:
    """One CKN layer: sub-patches of `patch_px`², `num_filters` outputs, Gaussian pooling by `subsampling`."""

    __pydantic_config__ = CLOSED

    patch_px: int
    num_filters: int
    subsampling: int

    def __post_init__(self) -> None:
        _at_least(self, patch_px=1, num_filters=1, subsampling=1)


@dataclass(frozen=True)
class CknSpec:
    """A convolutional kernel network on one kind of input map.

    For `grad` the first layer is the fixed orientation layer: patch_px 1, num_filters orientations.
    """

    __pydantic_config__ = CLOSED

    channel: Literal["grad", "white", "raw"]
    layers: tuple[LayerSpec, ...]
    alpha_quantile: float = 0.001  # α of a layer = this quantile of distances between unit sub-patches
    norm_power: float = 1.0  # sub-patch norms (grad: gradient magnitudes) to this power; 0.5 is better
    window_sigma: float | None = None  # Gaussian weight on layer-1 responses, as a share of the side
    descriptor_power: float = 1.0  # power-normalisation of the descriptor before its projection
    input_blur_px: float = 0.0  # Gaussian pre-blur of the patch
    shrink: int = 1  # squares of so many pixels are averaged first; what is in pixels counts those
    position_step: int = 1  # layer one is evaluated at every n-th position of each axis

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must hold at least one layer, got none")
        if self.channel == "grad" and self.layers[0].patch_px != 1:
            raise ValueError(f"the first layer of grad has patch_px 1, got {self.layers[0].patch_px}")
        if self.channel == "white" and self.layers[0].patch_px < 2:
            raise ValueError(f"the first layer of white has patch_px ≥ 2, got {self.layers[0].patch_px}")
        _at_least(self, position_step=1, input_blur_px=0, shrink=1)
        if self.layers[0].subsampling % self.position_step:
            pooling = self.layers[0].subsampling
            raise ValueError(
                f"position_step must divide layer one's subsampling {pooling}, got {self.position_step}"
            )
        if not 0 < self.alpha_quantile < 1:
            raise ValueError(f"alpha_quantile must lie between 0 and 1, got {self.alpha_quantile}")

    @property
    def learned_layers(self) -> range:
        """Positions of the layers that are learned: all but grad's orientations."""
        return range(1 if self.channel == "grad" else 0, len(self.layers))


@dataclass(frozen=True)
class CknTrainingSpec:
    """How filters are learned: `nystrom` (closed form) or `sgd` (the published way)."""

    __pydantic_config__ = CLOSED

    solver: Literal["nystrom", "sgd"] = "nystrom"
    num_patches: int = 100_000
    num_subpatches: int = 1_000_000
    kmeans_iterations: int = 10
    nystrom_epsilon: float = 1e-6
    keep_last_factor: bool = False  # κ^(−1/2) of the last layer: a whitening projection absorbs it
    sgd_batch_pairs: int = 1000
    sgd_iterations: int = 300_000
    sgd_validate_every: int = 1000
    sgd_validation_pairs: int = 10_000
    sgd_halve_every: int = 50_000  # the rate is divided by √2 this often
    sgd_rate_candidates: int = 41  # 2^(-k/2), k = 0 …
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, num_patches=1, num_subpatches=1, kmeans_iterations=1, sgd_batch_pairs=1)
        _at_least(self, sgd_iterations=1, sgd_validate_every=1, sgd_halve_every=1, sgd_rate_candidates=1)


@dataclass(frozen=True)
class ProjectionSpec:
    """PCA of a descriptor: L2, centre, project, divide by singular value^`whitening`, L2."""

    __pydantic_config__ = CLOSED

    dim: int = 128
    whitening: float = 1.0  # 0 none, 0.5 semi, 1 full
    num_descriptors: int = 10_000

    def __post_init__(self) -> None:
        _at_least(self, dim=1, whitening=0, num_descriptors=2)


# Networks that are not learned here from the images; those with weights take them from a file.
PLAIN_NETWORKS = ("sift", "rootsift")
WEIGHTED_NETWORKS = (
    *(f"alexnet-conv{number}" for number in range(1, 6)),
    *("philippnet", "philippnet-91", "deepcompare-siam", "deepcompare-siam2stream"),
    *("tfeat", "mkd", "mkd-lw"),
)
NETWORK_NAMES = (*PLAIN_NETWORKS, *WEIGHTED_NETWORKS)
PAIR_NETWORKS = ("deepcompare-2ch", "deepcompare-2ch2stream")  # they compare two patches and describe none


@dataclass(frozen=True)
class NetworkSpec:
    """A descriptor of patches that is not learned from the images: by hand, or with weights from a file."""

    __pydantic_config__ = CLOSED

    name: str
    # A file, until the run is planned; then `sha256:…` of the model that the run keeps of it.
    weights: str | None = None
    smoothing_px: float | None = None  # Gaussian blur of the patch; none: its own

    def __post_init__(self) -> None:
        if self.name not in NETWORK_NAMES:
            raise ValueError(f"no network named {self.name!r}; there are: {', '.join(NETWORK_NAMES)}")
        if self.weights is not None and not self.takes_weights:
            raise ValueError(f"{self.name} takes no weights, got {self.weights}")
        if self.smoothing_px is not None:
            _at_least(self, smoothing_px=0)

    @property
    def takes_weights(self) -> bool:
        return self.name in WEIGHTED_NETWORKS


@dataclass(frozen=True)
class ChannelSpec:
    """One descriptor of an image's patches, a CKN or another network, its projection and its VLAD words."""

    __pydantic_config__ = CLOSED

    ckn: CknSpec | None = None
    network: NetworkSpec | None = None
    projection: ProjectionSpec | None = None  # of a CKN there always is one; none: rows as they are
    weight: float = 1.0  # of its similarities in the mix of all channels
    max_points: int | None = None  # its VLAD is of so many, the strongest; none: of all keypoints

    def __post_init__(self) -> None:
        if (self.ckn is None) == (self.network is None):
            raise ValueError("a channel has either a ckn or a network")
        if self.ckn is not None and self.projection is None:
            object.__setattr__(self, "projection", ProjectionSpec())
        if self.max_points is not None:
            _at_least(self, max_points=1)
        if not 0 < self.weight <= 100:
            raise ValueError(f"weight must lie between 0 and 100, got {self.weight}")

    @property
    def name(self) -> str:
        """`grad`, `white` or `raw` for a CKN; the network's for another: `rootsift`."""
        return self.ckn.channel if self.ckn is not None else self._network.name

    @property
    def label(self) -> str:
        """Its name among all descriptors: `ckn-grad`, `rootsift`."""
        return self.name if self.ckn is None else f"ckn-{self.name}"

    @property
    def part_name(self) -> str:
        """The name of the model that describes patches: `ckn-grad`, `network-rootsift`."""
        return f"network-{self.name}" if self.ckn is None else self.label

    @property
    def num_layers(self) -> int:
        """Of a CKN; another network is not learned layer by layer."""
        return len(self.ckn.layers) if self.ckn is not None else 0

    @property
    def learned_layers(self) -> range:
        return self.ckn.learned_layers if self.ckn is not None else range(0)

    @property
    def num_descriptors(self) -> int:
        """That projections are learned from, of the VLAD and of points."""
        return (self.projection or ProjectionSpec()).num_descriptors

    @property
    def _network(self) -> NetworkSpec:
        assert self.network is not None
        return self.network

    def smoothed(self, smoothing_px: float) -> ChannelSpec:
        """The same on patches that are blurred first."""
        if self.ckn is not None:
            return replace(self, ckn=replace(self.ckn, input_blur_px=smoothing_px))
        return replace(self, network=replace(self._network, smoothing_px=smoothing_px))


@dataclass(frozen=True)
class VladSpec:
    """The codebook of each channel, and how residuals become a vector."""

    __pydantic_config__ = CLOSED

    num_words: int = 64
    intra_normalise: bool = True
    num_descriptors: int = 100_000
    kmeans_iterations: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, num_words=1, num_descriptors=2, kmeans_iterations=1)
        if self.num_words > MAX_WORDS:
            raise ValueError(f"num_words must be ≤ {MAX_WORDS}, got {self.num_words}")


@dataclass(frozen=True)
class PointsSpec:
    """What is kept of the strongest points to match images by: a frame, a word and a code each.

    The words are a power of two, as many as the sample supports and `num_words` at most (`count_words`).
    Descriptors of several channels stand side by side, and so do their codes.
    """

    __pydantic_config__ = CLOSED

    channels: tuple[str, ...] = ("grad",)
    max_points: int = 800  # of an image; 0: none are kept, and nothing is learned for them
    dim: int = 128  # of each channel; a code has a bit for each
    whitening: float = 0.75
    num_words: int = 16_384
    num_descriptors: int = 200_000  # at most, of as many patches as were sampled
    kmeans_iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, max_points=0, dim=8, whitening=0, num_words=1, num_descriptors=2, kmeans_iterations=1)
        if not self.channels or len(set(self.channels)) < len(self.channels):
            raise ValueError(f"channels must name at least one, each once, got {self.channels}")
        if self.dim % 8:
            raise ValueError(f"dim must be a multiple of 8, got {self.dim}")
        if self.num_words > MAX_WORDS:
            raise ValueError(f"num_words must be ≤ {MAX_WORDS}, got {self.num_words}")

    def count_words(self, num_images: int, num_descriptors: int) -> int:
        """A power of two: at most WORDS_PER_IMAGE words an image of the sample (its points resemble each
        other), and as many descriptors a word; above USUAL_WORDS, an image of the sample for each."""
        by_images = min(WORDS_PER_IMAGE * num_images, max(USUAL_WORDS, num_images))
        supported = min(by_images, num_descriptors // DESCRIPTORS_PER_WORD, self.num_words)
        return 1 << max(supported, 1).bit_length() - 1

    @property
    def bytes_per_point(self) -> int:
        """Frame, word and code."""
        return BYTES_PER_FRAME + BYTES_PER_WORD + count_code_bytes(self.dim * len(self.channels))


def count_code_bytes(dim: int) -> int:
    """Of a code with a bit for each of `dim` numbers: whole blocks of 128 bits."""
    return -(-dim // 128) * 16


@dataclass(frozen=True)
class ReductionSpec:
    """What becomes of the VLAD, and how many bytes of it are kept.

    `flatten` shrinks the few directions that most images share and keeps the others; it does what the
    images support, down to nothing. `pca` projects to `dim` numbers and whitens them, and needs
    `images_per_dim` · `dim` images: learned on fewer it destroys what it was not learned on.
    """

    __pydantic_config__ = CLOSED

    method: Literal["flatten", "pca", "none"] = "flatten"
    stored: Literal["signs", "float16"] = "signs"  # one bit a number, or two bytes
    num_images: int = 4096  # sampled images (or images of the background) it is learned on
    min_images: int = 128  # of flatten: fewer teach nothing, each is too large a part of the mean itself
    dim: int = 1024  # of pca
    images_per_dim: float = 1.0  # of pca

    def __post_init__(self) -> None:
        _at_least(self, num_images=2, min_images=2, dim=1, images_per_dim=1)
        if self.num_images < self.needed_images:
            raise ValueError(
                f"pca to dim {self.dim} needs num_images ≥ {self.needed_images}, got {self.num_images}"
            )

    @property
    def needed_images(self) -> int:
        """Below so many images this reduction cannot be learned."""
        return math.ceil(self.images_per_dim * self.dim) + 1 if self.method == "pca" else 0
