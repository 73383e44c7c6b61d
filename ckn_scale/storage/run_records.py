"""The numbered records of a run as types: plan, deletions, purges, background, arithmetic, models, versions.

`to_body` is the one writer of each and `from_body` its one reader; nobody else knows the form of a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckn_scale.storage.stored_files import StoredFile


@dataclass(frozen=True)
class PlanSource:
    """Where planned images came from; `sha256` is equal for relative and absolute paths, in any order."""

    urls: tuple[str, ...]  # the first ones
    count: int
    sha256: str
    file: str  # size and etag of a list, tar or table; empty for others

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> PlanSource:
        return cls(tuple(body["urls"]), body["count"], body["sha256"], body["file"])

    def __str__(self) -> str:
        more = self.count - len(self.urls)
        return ", ".join(self.urls) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Segment:
    """plan/000001.json: one frozen list of images."""

    number: int
    first_id: int
    num_images: int
    first_shard: int
    images_per_shard: int
    files: tuple[StoredFile, ...]
    sample: StoredFile
    queries: StoredFile  # images outside the sample to ask for when a version is certified
    source: PlanSource
    replaced: tuple[int, ...]  # ids of earlier segments whose content changed
    columns: Mapping[str, str]  # kept columns of the run as of this segment, with their types

    @property
    def num_shards(self) -> int:
        return -(-self.num_images // self.images_per_shard)

    @property
    def next_id(self) -> int:
        return self.first_id + self.num_images

    @property
    def next_shard(self) -> int:
        return self.first_shard + self.num_shards

    def ids_of_shard(self, shard_id: int) -> tuple[int, int]:
        """The first image id of one of its shards, and the one after the last."""
        first = (shard_id - self.first_shard) * self.images_per_shard
        end = min(first + self.images_per_shard, self.num_images)
        return self.first_id + first, self.first_id + end

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Segment:
        return cls(
            number=number,
            first_id=body["first_id"],
            num_images=body["num_images"],
            first_shard=body["first_shard"],
            images_per_shard=body["images_per_shard"],
            files=tuple(StoredFile(**file) for file in body["files"]),
            sample=StoredFile(**body["sample"]),
            queries=StoredFile(**body["queries"]),
            source=PlanSource.from_body(body["source"]),
            replaced=tuple(body["replaced"]),
            columns=dict(body["columns"]),
        )

    def to_body(self) -> dict[str, Any]:
        return {**_body(self), "columns": list(self.columns.items())}  # pairs: JSON sorts keys


@dataclass(frozen=True)
class Deletion:
    """deletions/000001.json: images that no version after it holds. Their ids are never given again."""

    number: int
    why: str  # "user": stays out though its source has it; "sync": was gone from its source
    ids: StoredFile  # sorted int64

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Deletion:
        return cls(number, str(body["why"]), StoredFile(**body["ids"]))

    def to_body(self) -> dict[str, Any]:
        return _body(self)


@dataclass(frozen=True)
class Purge:
    """purges/000001.json: nothing of these dead images is kept, and small index shards become large ones."""

    number: int
    deletions: int  # images of the deletion records up to this one,
    segments: int  # and images that were replaced in the plan up to this segment
    first_shards: tuple[int, ...]  # of each index shard, the first encoded one; later segments have their own
    next_shard: int  # the encoded shard after the last of them

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Purge:
        first_shards = tuple(map(int, body["first_shards"]))
        return cls(number, body["deletions"], body["segments"], first_shards, body["next_shard"])

    def to_body(self) -> dict[str, Any]:
        return _body(self)


@dataclass(frozen=True)
class Background:
    """background/000001.json: photographs that are not indexed, from which the reduction is learned."""

    number: int
    source: PlanSource
    num_images: int  # that were listed; at most `reduction.num_images` of them are used
    images: StoredFile

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Background:
        source, images = PlanSource.from_body(body["source"]), StoredFile(**body["images"])
        return cls(number, source, body["num_images"], images)

    def to_body(self) -> dict[str, Any]:
        return _body(self)


@dataclass(frozen=True)
class Numerics:
    """numerics/000001.json: the arithmetic that a run is computed with, or that it may be mixed."""

    number: int
    host: str
    arithmetic: Mapping[str, str] | None  # of the first worker that computed
    mix: bool = False

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Numerics:
        return cls(number, body["host"], body.get("arithmetic"), bool(body.get("mix")))

    def to_body(self) -> dict[str, Any]:
        return _body(self)


@dataclass(frozen=True)
class Generation:
    """models/000001.json: every model of a run at once."""

    number: int
    models: Mapping[str, StoredFile]  # by name
    taken_from: str | None = None  # the run that learned them, where it was another one

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Generation:
        models = {name: StoredFile(**file) for name, file in body["models"].items()}
        return cls(number, models, body.get("taken_from"))

    def to_body(self) -> dict[str, Any]:
        return _body(self)


@dataclass(frozen=True)
class MeasuredEvidence:
    """How evidence is judged: fitted on half of the queries, and what the other half said about it.

    Random pairs are planted views beside other images, drawn by hash; JSON makes their counts' keys text.
    """

    pairs: Mapping[str, int] = field(default_factory=dict)  # random pairs by inliers, of the first half
    other_pairs: Mapping[str, int] = field(default_factory=dict)  # of the other half
    strengths: Mapping[str, int] = field(default_factory=dict)  # random pairs by strength, in quarters
    thresholds: Mapping[str, int] = field(default_factory=dict)  # inliers of a match by false-alarm rate
    slope: float = 0.0  # of the curve from strength to score
    middle: float = 0.0
    real: int = 0  # of the first half's pairs, taken for images that do show the same
    false_alarms: int = 0  # of the other half's pairs, at or above the threshold of 1 in 1,000
    planted: int = 0  # views of the other half
    matched: int = 0  # of them, that are a match with their original
    words: int = 0  # that points are matched by; 0 in records before it was counted

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> MeasuredEvidence:
        return cls(**{one.name: body[one.name] for one in fields(cls) if one.name in body})


@dataclass(frozen=True)
class Certificate:
    """How a version answered queries whose answer is known; the gate that it had to pass.

    Without arguments: that of a version that was asked nothing.
    """

    queries: int = 0
    asked: int = 0  # of the queries, for this version
    new_asked: int = 0  # of those asked, for images that no version held before
    taken_over: int = 0  # of the queries, from the certificate of the version before
    in_sample: int = 0  # of those asked, for images that the models were trained on
    first: int = 0  # came back first, or behind copies only
    behind_copies: int = 0
    first_share: float = 0.0
    index_shards: int = 0
    asked_shards: int = 0
    rows: int = 0
    asked_rows: int = 0
    fewest_rows: int = 0  # that any query was asked of
    everywhere: int = 0  # queries that were asked of all rows
    everywhere_first: int = 0
    lower: float = 0.0  # end of the interval of `first_share`, with `confidence`
    confidence: float = 0.0
    target: float = 0.0  # that `lower` has to reach
    passed: bool = False
    accepted: bool = False  # published though it did not pass
    by_view: Mapping[str, float] = field(default_factory=dict)  # share that came back first
    draw: str = ""  # which images were asked for
    encoder: str = ""  # what made the vectors
    carried_from: int | None = None  # the version that was asked; images were deleted since
    outcomes: StoredFile | None = None  # of every query, for the next version
    shortlist: Mapping[str, Any] = field(default_factory=dict)  # of short codes: what was chosen and is kept
    evidence: MeasuredEvidence | None = None  # None where the run has no points

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Certificate:
        known = {one.name: body[one.name] for one in fields(cls) if one.name in body}
        outcomes = StoredFile(**known.pop("outcomes")) if known.get("outcomes") else None
        evidence = MeasuredEvidence.from_body(known.pop("evidence")) if known.get("evidence") else None
        known.setdefault("everywhere", known.get("queries", 0))  # records before it was counted
        return cls(**{**known, "outcomes": outcomes, "evidence": evidence})

    def to_body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Failures:
    """Images that could not be used, of those that no version holds yet, and of those one held."""

    new_images: int = 0
    new_failed: Mapping[str, int] = field(default_factory=dict)  # by state
    held_images: int = 0  # ok in the version before
    lost: int = 0  # of them, not ok any more: a retry met a store that had lost them
    limit: float = 0.0  # publish.max_failed_share

    @property
    def share(self) -> float:
        """The larger one: among the new images, or among those that were held."""
        new = sum(self.new_failed.values()) / self.new_images if self.new_images else 0.0
        return max(new, self.lost / self.held_images if self.held_images else 0.0)

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Failures:
        return cls(**{one.name: body[one.name] for one in fields(cls) if one.name in body})

    def to_body(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class Version:
    """index/000001.json: a published index."""

    number: int
    build: str
    manifest: StoredFile
    rows: int
    segments: int  # of the plan that it holds
    generation: int  # of the models
    states: Mapping[str, int]  # images of the run by state
    failures: Failures = Failures()
    certificate: Certificate = Certificate()
    restores: int | None = None  # a rollback: the earlier version that it has everything of
    deletions: int = 0  # records of deletions that it takes into account
    purge: int = 0  # the last purge that it takes into account

    @classmethod
    def from_body(cls, number: int, body: Mapping[str, Any]) -> Version:
        return cls(
            number=number,
            build=body["build"],
            manifest=StoredFile(**body["manifest"]),
            rows=body["rows"],
            segments=body["segments"],
            generation=body["generation"],
            states=body["states"],
            failures=Failures.from_body(body["failures"]),
            certificate=Certificate.from_body(body["certificate"]),
            restores=body.get("restores"),
            deletions=body.get("deletions", 0),
            purge=body.get("purge", 0),
        )

    def to_body(self) -> dict[str, Any]:
        body = {**_body(self), "failures": self.failures.to_body(), "certificate": self.certificate.to_body()}
        if self.restores is None:
            del body["restores"]  # published: the body that earlier releases wrote
        return body


def _body(
    record: Segment | Deletion | Purge | Background | Numerics | Generation | Version,
) -> dict[str, Any]:
    """The fields of a record but its number, which is its name."""
    body = asdict(record)
    del body["number"]
    return body
