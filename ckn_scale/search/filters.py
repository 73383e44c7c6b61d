"""Filters: which indexed images may be in an answer, by kept columns, URI or id.

    year>=2020              a kept column; also = != < <= > and ^= (begins with)
    uri^=s3://bucket/2020/  the URI
    image_id in 5,17,99     one of a list; `image_id in @ids.txt` reads it from a file, a line each

All conditions of a filter must hold. An image without a value in the column fulfils none, as in SQL. A
shard evaluates a filter over its side table as a whole, so what it admits is known before vectors are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import InputError

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
OPERATORS = (*_COMPARE, "^=", "in")
_FORM = re.compile(r"\s*([^\s=!<>^]+)\s*(!=|<=|>=|\^=|=|<|>|\bin\b)\s*(.*?)\s*", re.DOTALL)
_WORDS = {
    pa.bool_(): "true or false",
    pa.int64(): "whole numbers",
    pa.float64(): "numbers",
    pa.string(): "text",
}

Value: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Condition:
    """What one column must be. Text given for another type of column is read as that type."""

    column: str
    operator: str
    value: Value | tuple[Value, ...]  # a tuple with `in`

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise InputError(f"{self}: no operator {self.operator!r}; there are {' '.join(OPERATORS)}")
        if (self.operator == "in") != isinstance(self.value, tuple):
            raise InputError(f"{self}: `in` takes a tuple of values, and nothing else does")

    def __str__(self) -> str:
        return f"filter {self.column} {self.operator} {self.value!r:.60}"

    def evaluate(self, table: pa.Table) -> pa.ChunkedArray:
        """(rows,) bool or null over a side table; InputError for a column or value that does not fit it."""
        if self.column not in table.column_names:
            there = ", ".join(table.column_names)
            raise InputError(f"{self}: the index has no such column; it has {there}")
        column = table.column(self.column)
        if isinstance(self.value, tuple):
            values = [self._read(value, column.type) for value in self.value]
            return pc.is_in(column, value_set=pa.array(values, column.type), skip_nulls=True)
        if self.operator == "^=":
            if column.type != pa.string():
                raise InputError(f"{self}: ^= compares text, and the column holds {_WORDS[column.type]}")
            return pc.starts_with(column, str(self.value))
        return _COMPARE[self.operator](column, pa.scalar(self._read(self.value, column.type), column.type))

    def _read(self, value: Value, kind: pa.DataType) -> Value:
        try:
            return _READ[kind](value)
        except (KeyError, ValueError, OverflowError):
            raise InputError(f"{self}: the column holds {_WORDS[kind]}, got {value!r}") from None


@dataclass(frozen=True)
class Filter:
    """Conditions that must all hold: `Filter.parse("year>=2020", "uri^=s3://bucket/")`."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, *texts: str, files: bool = True) -> Filter:
        """One condition per text, as on the command line; InputError says what is wrong with it.

        Without `files`, for texts of strangers, a list cannot be read from a file.
        """
        return cls(tuple(_parse_condition(text, files=files) for text in texts))

    def evaluate(self, table: pa.Table) -> np.ndarray:
        """(rows,) bool over a side table."""
        mask = np.ones(len(table), bool)
        for condition in self.conditions:
            mask &= pc.fill_null(condition.evaluate(table), False).to_numpy()
        return mask


FilterLike: TypeAlias = Filter | str | Sequence[str]


def as_filter(given: FilterLike | None) -> Filter | None:
    """Whatever a Python caller gives: a Filter, a condition as text, or several."""
    if given is None or isinstance(given, Filter):
        return given
    return Filter.parse(given) if isinstance(given, str) else Filter.parse(*given)


def only_ids(image_ids: Iterable[int]) -> Filter:
    """The filter that admits these images."""
    return Filter((Condition("image_id", "in", tuple(image_ids)),))


def _parse_condition(text: str, *, files: bool) -> Condition:
    found = _FORM.fullmatch(text)
    if found is None:
        raise InputError(f"a filter is COLUMN OPERATOR VALUE, as in 'year>=2020', got {text!r}")
    column, operator, value = found.groups()
    if operator == "in":
        return Condition(column, operator, tuple(_read_list(value, files=files)))
    return Condition(column, operator, value)


def _read_list(value: str, *, files: bool) -> list[str]:
    if not value.startswith("@"):
        return [part.strip() for part in value.split(",")]
    if not files:
        raise InputError("a filter's list cannot be read from a file here: give the values")
    try:
        lines = Path(value[1:]).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the filter's list {value[1:]} cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip()]


def _read_bool(value: Value) -> bool:
    return value if isinstance(value, bool) else {"true": True, "false": False}[str(value)]


def _read_int(value: Value) -> int:
    if isinstance(value, bool) or int(value) != (value if isinstance(value, float) else int(value)):
        raise ValueError
    return int(np.int64(int(value)))


def _read_float(value: Value) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _read_text(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_READ: dict[pa.DataType, Callable[[Value], Value]] = {
    pa.bool_(): _read_bool,
    pa.int64(): _read_int,
    pa.float64(): _read_float,
    pa.string(): _read_text,
}
