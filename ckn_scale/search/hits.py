"""What an answer says of an indexed image. Light: clients of a server import it without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verified:
    """What the points of an image say about it."""

    match: bool  # at the false-alarm rate of the answer
    inliers: int
    box: tuple[float, float, float, float] | None
    transform: list[list[float]] | None
    similarity: float  # of the vectors
    selective: float  # of the words that both images have


@dataclass(frozen=True)
class Hit:
    """One indexed image in an answer; a larger score is more similar."""

    image_id: int
    uri: str
    score: float
    columns: dict[str, Any] = field(default_factory=dict)  # what the user kept beside the image
    verified: Verified | None = None  # what its points say; None in a search by vectors alone

    def __repr__(self) -> str:
        kept = f", columns={self.columns!r}" if self.columns else ""
        found = "" if self.verified is None else f", match={self.match}, inliers={self.inliers}"
        return f"Hit(score={self.score:.4f}, uri={self.uri!r}, image_id={self.image_id}{found}{kept})"

    @property
    def match(self) -> bool | None:
        """Whether it shows the same thing as the query; None when that was not looked at."""
        return None if self.verified is None else self.verified.match

    @property
    def inliers(self) -> int | None:
        """Places at which both images agree under one transform."""
        return None if self.verified is None else self.verified.inliers

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """x1, y1, x2, y2 around what matches, in pixels of the upright indexed image."""
        return None if self.verified is None else self.verified.box

    @property
    def transform(self) -> list[list[float]] | None:
        """3 × 3: a pixel of the query → the indexed image, for a match."""
        return None if self.verified is None else self.verified.transform

    def to_form(self) -> dict[str, Any]:
        """As JSON has it; what verification says only where there was one."""
        form = {"image_id": self.image_id, "uri": self.uri, "score": self.score, "columns": self.columns}
        return form if self.verified is None else {**form, **asdict(self.verified)}


class Answer(list[Hit]):
    """Hits, best first.

    `copies` has, with group_copies, by a hit's id those of hits that show the same picture and were left out.
    """

    def __init__(
        self,
        hits: Iterable[Hit] = (),
        *,
        verified: bool = False,
        copies: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(hits)
        self.verified = verified
        shown = {hit.image_id for hit in self}
        self.copies = {one: tuple(ids) for one, ids in (copies or {}).items() if one in shown}

    @property
    def found(self) -> bool | None:
        """Whether a hit shows the same thing as the query; None when that was not looked at."""
        return any(hit.match for hit in self) if self.verified else None


@dataclass(frozen=True)
class IndexedImage:
    """An image that the index holds, as its side table and its points know it."""

    image_id: int
    uri: str
    columns: dict[str, Any]
    size_px: tuple[int, int] | None  # width, height of the upright original; None: not known
