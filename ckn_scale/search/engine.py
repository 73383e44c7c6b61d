"""Open a published index in this process and ask it for images.

index = ckn_scale.open_index("s3://bucket/run")
answer = index.search("photo.jpg", k=5)
if answer.found:
    ...  # answer[0].uri, .score, .inliers, .box
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.encoder import EncodedImage, ImageEncoder
from ckn_scale.core.evidence import SHORTLIST
from ckn_scale.core.images import decode_image
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.numerics import compute_threads, require_device
from ckn_scale.core.ranking import Ranking, expand_ranking
from ckn_scale.errors import InputError
from ckn_scale.search.cache import FileCache
from ckn_scale.search.evidence import (
    GroupCandidates,
    Query,
    add_evidence,
    gather_evidence,
    leave_out,
    load_query,
    make_query,
    rank_best,
)
from ckn_scale.search.filters import FilterLike, as_filter
from ckn_scale.search.hit_copies import COPIES_DEPTH, CopyFinder, keep_all
from ckn_scale.search.hits import Answer as Answer
from ckn_scale.search.hits import Hit
from ckn_scale.search.matches import PairMatch, match_encoded, match_stored
from ckn_scale.search.query_images import Box, ImageLike, check_box, image_bytes, naming_image
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.versions import open_version
from ckn_scale.storage.index_files import IndexManifest
from ckn_scale.storage.models import load_models
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

Expansion: TypeAlias = Literal[False, True, "discriminative"]
Images: TypeAlias = "list[ImageLike] | tuple[ImageLike, ...]"

IMAGES_AT_ONCE = 16  # of a list: their patches share batches, and lie in memory together


class Index:
    """One published version of a run, opened by `open_index`: search it, or encode images like it.

    `version` is its number and `len(index)` how many images it holds. An image is a path or URI (str or
    Path), the bytes of a file, a binary file object, a PIL image, or an array: (H, W, 3) RGB or (H, W) grey,
    uint8. Threads may share an Index; queries are encoded one at a time.
    """

    def __init__(
        self,
        version: int,
        encoder: ImageEncoder,
        shards: ShardGroup,
        *,
        run_url: str = "",
        threads: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.version = version
        self.run_url = run_url
        self.calibration = calibration or Calibration()
        self._encoder = encoder
        self._shards = shards
        self._copies = CopyFinder(shards)
        self._threads = threads  # none: whatever the process has

    def __len__(self) -> int:
        return self._shards.rows

    def __repr__(self) -> str:
        return f"<Index {self.run_url!r} version {self.version}: {len(self):,} images, {self.dim} dimensions>"

    @property
    def dim(self) -> int:
        """The dimensions of a vector."""
        return self._shards.dim

    @property
    def shards(self) -> ShardGroup:
        """What it searches."""
        return self._shards

    @property
    def can_verify(self) -> bool:
        """Whether the index holds points, by which answers are verified."""
        return self._shards.has_points

    @overload
    def search(
        self,
        image: ImageLike,
        k: int = 10,
        box: Box | None = None,
        *,
        verify: bool | None = None,
        expand: Expansion = False,
        filter: FilterLike | None = None,
        group_copies: bool = False,
    ) -> Answer: ...
    @overload
    def search(
        self,
        image: Images,
        k: int = 10,
        *,
        verify: bool | None = None,
        expand: Expansion = False,
        filter: FilterLike | None = None,
        group_copies: bool = False,
    ) -> list[Answer]: ...
    def search(
        self,
        image: ImageLike | Images,
        k: int = 10,
        box: Box | None = None,
        *,
        verify: bool | None = None,
        expand: Expansion = False,
        filter: FilterLike | None = None,
        group_copies: bool = False,
    ) -> Answer | list[Answer]:
        """The `k` indexed images that show most likely the same (or all, where there are fewer), best first.

        A list or tuple of images gives a list of answers, in its order, in less time than one by one.
        `box` (x1, y1, x2, y2), in pixels of the upright image, searches for that part of it. `verify`
        compares points: hits then have `match`, `inliers`, `box` and `transform`, and an answer is `found` or
        not; by default where the index has points. `expand` asks once more together with the verified hits,
        which finds more of the same thing; "discriminative" by what tells them from other images.
        `filter` admits some images only: "year>=2020", or a list of such. With `group_copies` an answer has
        of near-copies of each other only the best, and `answer.copies` the ids of the others.
        Raises ImageRejected when an image is missing, cannot be read or shows nothing to describe, InputError
        when a filter does not fit or there are no points to verify by, and TypeError or ValueError for what
        is no image, an empty list, k < 1 or a box without area.
        """
        _check_k(k)
        verify = self._resolve_verify(verify, expand)
        is_list = isinstance(image, list | tuple)
        queries = self._encode(_as_list(image, box), box)
        options: dict[str, Any] = {"verify": verify, "expand": expand, "filter": filter}
        answers = self.search_queries(queries, k, **options, group_copies=group_copies)
        return answers if is_list else answers[0]

    def similar(
        self,
        image_id: int,
        k: int = 10,
        *,
        verify: bool | None = None,
        expand: Expansion = False,
        filter: FilterLike | None = None,
        group_copies: bool = False,
    ) -> Answer:
        """The `k` images that show most likely the same as an indexed one, which is not among them.

        It is asked by what is stored of it: nothing is read or encoded. Options and errors as of `search`;
        InputError when there is no such image.
        """
        query = self._load_query(image_id)
        options: dict[str, Any] = {"verify": verify, "expand": expand, "filter": filter}
        return self.search_queries([query], k, **options, group_copies=group_copies, without=image_id)[0]

    def match(self, one: ImageLike | int, other: ImageLike | int, box: Box | None = None) -> PairMatch:
        """Which points of two images match under one transform: files, arrays, …, or ids of indexed images.

        `box` is the part of the first that is looked at. `result.judge(index.calibration)` says whether they
        show the same, and how surely. Raises like `search`, and InputError where the index has no points or
        no such image.
        """
        if isinstance(one, int):
            if box is not None:
                raise ValueError("a box goes with an image, not with the id of an indexed one")
            query = self._load_query(one)
        else:
            query = self.encode_query(one, box)
        if not isinstance(other, int):
            return match_encoded(query, self._describe([other], None)[0])
        found = match_stored(self._shards, query, other)
        if found is None:
            raise self._no_image(other)
        return found

    def _load_query(self, image_id: int) -> Query:
        query = load_query(self._shards, image_id)
        if query is None:
            raise self._no_image(image_id)
        return query

    def _no_image(self, image_id: int) -> InputError:
        return InputError(f"{self.run_url} version {self.version} has no image {image_id}")

    def search_queries(
        self,
        queries: Sequence[Query],
        k: int = 10,
        *,
        verify: bool | None = None,
        expand: Expansion = False,
        filter: FilterLike | None = None,
        group_copies: bool = False,
        without: int | None = None,
    ) -> list[Answer]:
        """The answers for images that `encode_query` encoded, together in less time than alone.

        The image `without` is in none of them.
        """
        _check_k(k)
        verify = self._resolve_verify(verify, expand)
        if not queries:
            return []
        chosen = as_filter(filter)
        allowed = None if chosen is None else self._shards.allow(chosen)
        vectors = np.stack([query.vector for query in queries])
        depth = max(k, COPIES_DEPTH) if group_copies else k
        count = max(depth, SHORTLIST) if verify else depth
        similarity, image_ids = self._shards.find(vectors, count + (without is not None), allowed=allowed)
        found = [leave_out(*one, without, count) for one in zip(image_ids, similarity, strict=True)]
        drop_copies = self._copies.leave_out if group_copies else keep_all
        if not verify:
            kept = [drop_copies(self._shards.describe(*one)) for one in found]
            return [Answer(hits[:k], copies=copies) for hits, copies in kept]
        centroids = self._encoder.points.centroids if expand and self._encoder.points is not None else None
        candidates = GroupCandidates(self._shards, centroids, allowed, without)
        answers = []
        for query, (ids, values) in zip(queries, found, strict=True):
            ranking = _rank(self._shards, candidates, query, (ids, values), expand)
            ranked, copies = drop_copies(rank_best(ranking, self.calibration, depth))
            answers.append(Answer(add_evidence(self._shards, ranked[:k]), verified=True, copies=copies))
        return answers

    def _resolve_verify(self, verify: bool | None, expand: Expansion) -> bool:
        if expand not in (False, True, "discriminative"):
            raise ValueError(f"expand is True, False or 'discriminative', got {expand!r}")
        if expand and verify is False:
            raise InputError(
                "expansion begins with verified hits: expand and no verification exclude each other"
            )
        verify = True if expand else verify
        if verify and not self.can_verify:
            raise InputError(
                f"{self.run_url} version {self.version} has no points to verify by: search without --verify "
                "(verify=False), or index the images again into another run folder"
            )
        return self.can_verify if verify is None else verify

    def encode_query(self, image: ImageLike, box: Box | None = None) -> Query:
        """What `search_queries` takes for an image; raises like `search`."""
        return self._encode([image], box)[0]

    def read_pixels(self, image: ImageLike, box: Box | None = None) -> np.ndarray:
        """An image as it is described: (H, W, 3) uint8 RGB, upright, at working size."""
        return decode_image(image_bytes(image), self._encoder.preprocessor.images, box)

    def encode(self, image: ImageLike | Images, box: Box | None = None) -> np.ndarray:
        """The vector of an image: (D,) float32 of unit length; of a list of N images (N, D).

        The inner product of two vectors is their images' similarity. Raises like `search`.
        """
        queries = self._encode(_as_list(image, box), box)
        vectors = np.stack([query.vector for query in queries])
        if isinstance(image, list | tuple):
            return vectors
        first: np.ndarray = vectors[0]
        return first

    def search_vector(self, vector: np.ndarray | Sequence[float], k: int = 10) -> list[Hit]:
        """The `k` most similar images for a (D,) vector, as `encode` gives it; by vectors alone."""
        return self.search_vectors(np.asarray(vector, dtype=np.float32)[None], k)[0]

    def search_vectors(self, vectors: np.ndarray | Sequence[np.ndarray], k: int = 10) -> list[list[Hit]]:
        """The answers for (N, D) vectors, one after the other; together they take less time than alone."""
        _check_k(k)
        matrix = np.asarray(vectors, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != self.dim:
            raise ValueError(f"a vector of this index has {self.dim} numbers, got an array {matrix.shape}")
        return self._shards.search(matrix, k)

    def vector(self, image_id: int) -> np.ndarray | None:
        """The (D,) vector of an indexed image, None when there is none."""
        return self._shards.vector(image_id)

    def thumbnail(self, image_id: int) -> bytes | None:
        """The JPEG thumbnail of an indexed image, None when there is none."""
        return self._shards.thumbnail(image_id)

    def _encode(self, images: Sequence[ImageLike], box: Box | None) -> list[Query]:
        encoded = self._describe(images, box)
        with nullcontext() if self._threads is None else compute_threads(self._threads):
            return [make_query(one, self._encoder, box) for one in encoded]

    def _describe(self, images: Sequence[ImageLike], box: Box | None) -> list[EncodedImage]:
        if box is not None:
            check_box(box)
        encoded: list[EncodedImage] = []
        for start in range(0, len(images), IMAGES_AT_ONCE):
            files, prepared = [], []
            group = range(start, min(start + IMAGES_AT_ONCE, len(images)))
            for place in group:
                with naming_image(images, place):
                    files.append(image_bytes(images[place]))
            with nullcontext() if self._threads is None else compute_threads(self._threads):
                for place, data in zip(group, files, strict=True):
                    with naming_image(images, place):
                        prepared.append(self._encoder.preprocessor.prepare(data, box))
                encoded += self._encoder.encode_prepared(prepared)
        return encoded


def _rank(
    shards: ShardGroup,
    candidates: GroupCandidates,
    query: Query,
    found: tuple[np.ndarray, np.ndarray],
    expand: Expansion,
) -> Ranking:
    if query.points is None:
        raise InputError("a query without points cannot be verified: its encoder has no model for them")
    first = gather_evidence(shards, query.points, *found)
    if not expand:
        return first
    discriminative = expand == "discriminative"
    return expand_ranking(candidates, query.vector, query.points, first, discriminative=discriminative)


def open_index(
    run_url: str | os.PathLike[str],
    version: int | None = None,
    *,
    threads: int | None = None,
    device: str | None = None,
    cache_folder: Path | None = None,
) -> Index:
    """Open the current (or a given) published version of a run: a folder, or `s3://bucket/run`.

    Every file is checked against its sha256 first; files of a far store are copied to `cache_folder`
    ($CKN_SCALE_CACHE, or the user's cache folder) once. `device` overrides where the run was encoded
    ("cpu" opens on a laptop what a GPU cluster built). The index computes with `threads` threads, by
    default as many as the run was made with: queries then get the bytes that the run would give them.
    The threads of torch, OpenMP and OpenCV are set while it computes, and are as before afterwards.

    Raises InputError when there is no such run, version or device, CorruptData when a file has other bytes
    than were recorded.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be ≥ 1, got {threads}")
    run = RunFolder.open(os.fspath(run_url))
    published = open_version(run, version)
    parts = _load_parts(run.store, published.manifest, device)
    threads = threads or int(parts["encoder"].metadata["numerics"]["threads"])
    cache = FileCache(cache_folder)
    shards = ShardGroup(run.store, published.manifest, threads=threads, cache=cache)
    encoder = ImageEncoder.from_parts(parts)
    return Index(
        published.number,
        encoder,
        shards,
        run_url=run.url,
        threads=threads,
        calibration=published.calibration,
    )


def load_encoder(store: Store, manifest: IndexManifest, *, device: str | None = None) -> ImageEncoder:
    """The encoder whose vectors the index holds."""
    return ImageEncoder.from_parts(_load_parts(store, manifest, device))


def _load_parts(store: Store, manifest: IndexManifest, device: str | None) -> dict[str, ModelPart]:
    parts = load_models(store, manifest.models)
    arrays, metadata = parts["encoder"]
    numerics = {**metadata["numerics"], **({"device": device} if device else {})}
    require_device(numerics["device"])
    parts["encoder"] = ModelPart(arrays, {**metadata, "numerics": numerics})
    return parts


def _as_list(image: ImageLike | Images, box: Box | None) -> Sequence[ImageLike]:
    if not isinstance(image, list | tuple):
        return [image]
    if not image:
        raise ValueError("the list of images is empty")
    if box is not None:
        raise ValueError(f"a box goes with one image, got a list of {len(image)}")
    return image


def _check_k(k: int) -> None:
    if operator.index(k) < 1:
        raise ValueError(f"k must be ≥ 1, got {k}")
