"""The forms of requests and answers, as /openapi.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import to_jsonable_python

from ckn_scale.core.calibration import Calibration
from ckn_scale.errors import InputError
from ckn_scale.search.filters import Filter
from ckn_scale.search.hits import Hit
from ckn_scale.serving.answers import MatchAnswer, SearchAnswer, SearchOptions
from ckn_scale.serving.messages import Box

MAX_ID = 2**63 - 1
ImageId = Annotated[int, Path(ge=0, le=MAX_ID)]


def check_area(box: Box | None) -> Box | None:
    if box is not None and not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"a box needs x1 < x2 and y1 < y2, got {list(box)}")
    return box


class SearchFields(BaseModel):
    """What a search may say besides its image."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    k: int = Field(default=10, ge=1, description="how many hits")
    offset: int = Field(default=0, ge=0, description="leave out the best so many")
    box: tuple[float, float, float, float] | None = Field(
        default=None, description="x1, y1, x2, y2 in pixels of the upright image: search for this part"
    )
    verify: bool | None = Field(
        default=None, description="verify hits by their points; by default where the index has points"
    )
    expand: bool | Literal["discriminative"] = Field(
        default=False,
        description="ask once more together with the verified hits; discriminative: "
        "by what tells them from other images",
    )
    filter: str | list[str] | None = Field(
        default=None, description="only images that fulfil it: year>=2020; a list: all of its conditions"
    )
    version: int | None = Field(
        default=None, ge=1, le=MAX_ID, description="a version in memory; by default the current one"
    )
    min_score: float | None = Field(default=None, ge=0, le=1, description="only hits of at least this score")
    group_copies: bool = Field(
        default=False,
        description="of hits that are near-copies of each other only the best, with the others' ids",
    )
    strict: bool = Field(default=False, description="an error instead of a partial answer")

    check_box = field_validator("box")(check_area)

    @field_validator("filter")
    @classmethod
    def _filter_is_one(cls, texts: str | list[str] | None) -> str | list[str] | None:
        try:
            parse_filter(texts)
        except InputError as error:
            raise ValueError(str(error)) from None
        return texts

    def to_options(self) -> SearchOptions:
        return SearchOptions(
            k=self.k,
            offset=self.offset,
            verify=self.verify,
            expand=self.expand,
            wanted=parse_filter(self.filter),
            min_score=self.min_score,
            group_copies=self.group_copies,
            strict=self.strict,
        )


class SearchRequest(SearchFields):
    image: str = Field(description="a JPEG, PNG, … file: base64, with or without newlines, or a data URL")


class BatchRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: list[SearchRequest] = Field(min_length=1, description="searches, all of one version")
    version: int | None = Field(default=None, ge=1, le=MAX_ID, description="of all; as of a search")


class MatchRequest(BaseModel):
    """`image` with `image_id` or `other`, or `image_id` with `other_id`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    image: str | None = Field(default=None, description="a file, base64 as in a search")
    image_id: int | None = Field(default=None, ge=0, le=MAX_ID, description="an indexed image")
    other: str | None = Field(default=None, description="a second file")
    other_id: int | None = Field(default=None, ge=0, le=MAX_ID, description="a second indexed image")
    box: tuple[float, float, float, float] | None = Field(
        default=None, description="the part of `image` that is looked at"
    )

    check_box = field_validator("box")(check_area)

    @model_validator(mode="after")
    def _two_images(self) -> MatchRequest:
        given = {
            name for name in ("image", "image_id", "other", "other_id") if getattr(self, name) is not None
        }
        if given not in ({"image", "image_id"}, {"image", "other"}, {"image_id", "other_id"}):
            raise ValueError("give image and image_id, image and other, or image_id and other_id")
        if self.box is not None and self.image is None:
            raise ValueError("a box goes with image, a file")
        return self


class UriRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(description="of an image below one of the server's `uri_prefixes`", max_length=4096)


def parse_filter(texts: str | list[str] | None) -> Filter | None:
    if texts is None:
        return None
    return Filter.parse(*([texts] if isinstance(texts, str) else texts), files=False)


class HitForm(BaseModel):
    image_id: int
    uri: str
    score: float
    columns: dict[str, Any]
    # When it was verified:
    match: bool | None = Field(default=None, description="whether it shows the same thing")
    inliers: int | None = Field(default=None, description="places that agree under one transform")
    box: tuple[float, float, float, float] | None = Field(default=None, description="around what matches")
    transform: list[list[float]] | None = Field(default=None, description="3 × 3, query's pixels → its own")
    similarity: float | None = Field(default=None, description="of the vectors")
    selective: float | None = Field(default=None, description="of the words both images have")
    copies: list[int] | None = Field(
        default=None, description="with group_copies: hits that show the same picture and are left out"
    )


class DecisionForm(BaseModel):
    """What makes a hit a match."""

    min_inliers: int
    false_alarm_rate: float = Field(description="share of pairs of unrelated images that have as many")


class SearchResponse(BaseModel):
    version: int
    hits: list[HitForm]
    found: bool | None = Field(default=None, description="whether a hit is a match, when they were verified")
    decision: DecisionForm | None = Field(default=None, description="when hits were verified")
    coverage: float = Field(description="share of the index that was searched")
    partial: bool
    timings_ms: dict[str, float]
    request_id: str


class ErrorBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    code: str
    message: str


class ErrorResponse(BaseModel):
    error: ErrorBody


class BatchResponse(BaseModel):
    version: int
    results: list[SearchResponse | ErrorResponse] = Field(description="in the order of the queries")
    timings_ms: dict[str, float]
    request_id: str


class MatchResponse(BaseModel):
    match: bool = Field(description="whether both show the same thing")
    score: float = Field(description="as of a hit")
    inliers: int = Field(description="places that agree under one transform")
    transform: list[list[float]] | None = Field(description="3 × 3, pixels of the first → the second")
    box: tuple[float, float, float, float] | None = Field(description="around what matches in the second")
    matches: list[tuple[float, float, float, float]] = Field(
        description="x, y in the first and x, y in the second, of all verified matches; upright pixels"
    )
    sizes: list[tuple[int, int]] = Field(description="width and height of both upright images; of the box")
    decision: DecisionForm
    version: int
    timings_ms: dict[str, float]
    request_id: str


class ImageResponse(BaseModel):
    image_id: int
    uri: str
    columns: dict[str, Any]
    state: Literal["ok"] = Field(description="others are in no index; a deleted image's 404 says so")
    width: int | None = Field(description="of the upright original; null where it is not known")
    height: int | None
    version: int
    original: bool = Field(description="whether /v1/images/{id}/original gives its file")


class ExampleForm(BaseModel):
    image_id: int
    uri: str


class ExamplesResponse(BaseModel):
    version: int
    images: list[ExampleForm]


class LimitsForm(BaseModel):
    max_k: int = Field(description="k and offset together are at most this")
    max_batch: int = Field(description="queries of a batch")
    body_limit_bytes: int
    pixels: int = Field(description="of an image")


class IndexResponse(BaseModel):
    version: int
    images: int
    dim: int
    kind: str
    shards: int
    groups: int
    certificate: dict[str, Any] | None
    can_verify: bool
    uri_prefixes: list[str] = Field(description="where originals and URIs may be fetched from")
    limits: LimitsForm


class VersionForm(BaseModel):
    version: int
    rows: int
    build: str


class VersionsResponse(BaseModel):
    current: int
    resident: list[int] = Field(description="those that a search may ask for")
    versions: list[VersionForm]


class HealthResponse(BaseModel):
    status: str


class ReadyResponse(BaseModel):
    ready: bool
    version: int
    images: int
    not_ready: list[str]


def make_response(answer: SearchAnswer, timings_ms: Mapping[str, float], request_id: str) -> SearchResponse:
    verdict: dict[str, Any] = {}
    if answer.decision is not None:
        verdict = {"found": answer.found, "decision": _make_decision(answer.decision)}
    return SearchResponse(
        version=answer.version,
        hits=[_make_hit(hit, answer.copies) for hit in answer.hits],
        coverage=answer.coverage,
        partial=answer.partial,
        **verdict,
        timings_ms=_round_times(timings_ms),
        request_id=request_id,
    )


def make_match_response(
    answer: MatchAnswer, timings_ms: Mapping[str, float], request_id: str
) -> MatchResponse:
    found = answer.found
    return MatchResponse(
        match=answer.match,
        score=answer.score,
        inliers=found.inliers,
        transform=None if found.transform is None else found.transform.tolist(),
        box=found.box,
        matches=np.round(found.pairs, 2).tolist(),
        sizes=list(found.sizes_px),
        decision=_make_decision(answer.decision),
        version=answer.version,
        timings_ms=_round_times(timings_ms),
        request_id=request_id,
    )


def _make_decision(rule: Calibration) -> DecisionForm:
    return DecisionForm(min_inliers=rule.min_inliers, false_alarm_rate=rule.false_alarm_rate)


def _round_times(timings_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in timings_ms.items()}


def _make_hit(hit: Hit, copies: Mapping[int, list[int]] | None) -> HitForm:
    grouped = {} if copies is None else {"copies": copies.get(hit.image_id, [])}
    return HitForm(**{**hit.to_form(), "columns": make_columns(hit.columns), **grouped})


def make_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """What users keep beside an image may be dates or bytes."""
    made: dict[str, Any] = to_jsonable_python(columns, bytes_mode="base64")
    return made
