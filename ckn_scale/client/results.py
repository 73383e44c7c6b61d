"""What a server's answers become: the API's forms as dataclasses. Keys that are new to us are passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar, overload

from ckn_scale.errors import ServerError
from ckn_scale.search.hits import Hit, Verified

Form = TypeVar("Form")
Box: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decision:
    """What makes a hit a match."""

    min_inliers: int
    false_alarm_rate: float


@dataclass(frozen=True)
class Answer(Sequence[Hit]):
    """The hits of a search, best first, and how they were come by.

    `found` and `decision` are None when hits were not verified. `copies` has, with group_copies, by a hit's
    id those of hits that show the same picture and were left out.
    """

    version: int
    hits: tuple[Hit, ...]
    coverage: float
    partial: bool
    timings_ms: Mapping[str, float]
    request_id: str = ""
    found: bool | None = None
    decision: Decision | None = None
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @overload
    def __getitem__(self, place: int) -> Hit: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Hit, ...]: ...
    def __getitem__(self, place: int | slice) -> Hit | tuple[Hit, ...]:
        return self.hits[place]

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)


@dataclass(frozen=True)
class Match:
    """Two images compared; `matches` are verified pairs x, y, x', y' in pixels of both, upright."""

    match: bool
    score: float
    inliers: int
    transform: Sequence[Sequence[float]] | None
    box: Box | None
    matches: Sequence[Sequence[float]]
    sizes: Sequence[Sequence[int]]
    version: int
    decision: Decision | None = None
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageInfo:
    image_id: int
    uri: str
    columns: Mapping[str, Any]
    state: str
    width: int | None
    height: int | None
    version: int
    original: bool = False  # whether the server gives its file


@dataclass(frozen=True)
class IndexInfo:
    version: int
    images: int
    dim: int
    kind: str
    shards: int
    groups: int
    can_verify: bool
    certificate: Mapping[str, Any] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionInfo:
    version: int
    rows: int
    build: str


@dataclass(frozen=True)
class Versions:
    current: int
    resident: Sequence[int]  # those that a search may ask for
    versions: Sequence[VersionInfo]


def make_form(form: type[Form], body: Mapping[str, Any], **own: Any) -> Form:
    """The dataclass of what the body has; ServerError when it lacks something."""
    known = {one.name: body[one.name] for one in fields(form) if one.name in body}  # type: ignore[arg-type]
    try:
        return form(**{**known, **own})
    except TypeError as error:
        raise ServerError(f"the answer is not one of a ckn_scale server of this release: {error}") from None


def make_answer(body: Mapping[str, Any]) -> Answer:
    forms = body.get("hits", [])
    hits = tuple(make_form(Hit, form, verified=_make_verified(form)) for form in forms)
    copies = {form["image_id"]: tuple(form["copies"]) for form in forms if form.get("copies")}
    return make_form(Answer, body, hits=hits, decision=_make_decision(body), copies=copies)


def make_match(body: Mapping[str, Any]) -> Match:
    box = tuple(body["box"]) if body.get("box") else None
    return make_form(Match, body, box=box, decision=_make_decision(body))


def make_versions(body: Mapping[str, Any]) -> Versions:
    versions = [make_form(VersionInfo, form) for form in body.get("versions", [])]
    return make_form(Versions, body, versions=versions)


def _make_verified(form: Mapping[str, Any]) -> Verified | None:
    if form.get("inliers") is None:
        return None
    return make_form(Verified, form, box=tuple(form["box"]) if form.get("box") else None)


def _make_decision(body: Mapping[str, Any]) -> Decision | None:
    decision = body.get("decision")
    return None if decision is None else make_form(Decision, decision)
