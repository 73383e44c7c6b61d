"""What `ckn-scale evaluate --json` and `study` wrote, checked as it is read: files come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ckn_scale.errors import InputError

MEASURES = ("fpr95", "map", "score")


class Answered(BaseModel):
    image: str
    right: bool


class Example(BaseModel):
    """One query and the first of its answer."""

    query: str
    box: tuple[float, float, float, float] | None = None
    score: float
    relevant: int
    answer: list[Answered]


class Pair(BaseModel):
    scene: str
    pair: str
    ap: float


class Place(BaseModel):
    """A place of the grid."""

    model_config = ConfigDict(extra="ignore")
    region: float | None = None
    smoothing_px: float | None = None
    intra_normalise: bool | None = None
    map: float | None = None
    score: float | None = None
    fpr95: float | None = None


class Result(Place):
    """One row of a table: a descriptor at its best place, or one stage of a search."""

    descriptor: str
    dim: int | None = None
    bytes: int | None = None
    reduction: str = "none"
    stage: str | None = None
    points: str | None = None
    ms: float | None = None
    spread: float | None = None
    train_seconds: float | None = None
    describe_seconds: float | None = None
    per_scene: dict[str, float] = Field(default_factory=dict)
    pairs: list[Pair] = Field(default_factory=list)
    grid: list[Place] = Field(default_factory=list)
    recall_at: dict[int, float] = Field(default_factory=dict)
    examples: list[Example] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_a_figure(self) -> Result:
        if all(getattr(self, name) is None for name in MEASURES):
            raise ValueError(f"{self.descriptor} has none of {', '.join(MEASURES)}")
        return self

    @property
    def name(self) -> str:
        """With what was done to its vectors, and how far a search went."""
        parts = [self.descriptor, *([] if self.reduction == "none" else [self.reduction])]
        if self.reduction == "pca":
            parts[-1] = f"pca {self.dim}"
        if self.stage is not None:
            parts += [self.stage, *([f"points {self.points}"] if self.points else [])]
        return ", ".join(parts)

    @property
    def plain(self) -> bool:
        """Whether it is what the paper's tables show: vectors as they are."""
        return self.reduction == "none" and self.stage is None


class Evaluation(BaseModel):
    """One file."""

    model_config = ConfigDict(extra="ignore")
    protocol: str
    results: list[Result] = Field(min_length=1)
    data: str = ""
    images: int | None = None
    queries: int | None = None
    trained_on: str = ""
    measured_at: str = ""
    seconds: float | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def measure(self) -> str:
        return next(name for name in MEASURES if getattr(self.results[0], name) is not None)

    @property
    def title(self) -> str:
        return Path(self.data).name or self.protocol

    def figure_of(self, place: Place) -> float:
        return float(getattr(place, self.measure) or 0.0)

    def format(self, value: float) -> str:
        """In points, or UKBench's score."""
        return f"{value:.3f}" if self.measure == "score" else f"{100 * value:.1f}"

    @property
    def unit(self) -> str:
        named = {"map": "mAP", "score": "score of 4", "fpr95": "FPR@95 in %, lower is better"}
        return named[self.measure]

    def rank(self) -> list[Result]:
        """Best first."""
        best_first = -1 if self.measure != "fpr95" else 1
        return sorted(self.results, key=lambda one: best_first * self.figure_of(one))


class StudyRow(BaseModel):
    model_config = ConfigDict(extra="ignore")
    panel: str
    series: str
    x: float | str
    figure: float | None
    spread: float | None = None
    reason: str = ""


class StudyFile(BaseModel):
    """What `ckn-scale study` wrote."""

    model_config = ConfigDict(extra="ignore")
    study: str
    question: str
    x_label: str = ""
    unit: str
    protocol: str
    rows: list[StudyRow] = Field(min_length=1)
    data: str = ""
    sizes: str = ""
    trained_on: str = ""
    seconds: float | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


def read_measured(path: Path) -> Evaluation | StudyFile:
    """An evaluation or a study; InputError for what is neither."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError):
        raise InputError(f"{path} cannot be read as JSON") from None
    is_study = isinstance(content, dict) and "study" in content
    verb, form = ("study", StudyFile) if is_study else ("evaluate --json", Evaluation)
    try:
        return form.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} is not what `ckn-scale {verb}` writes: {where}: {first['msg']}") from None
