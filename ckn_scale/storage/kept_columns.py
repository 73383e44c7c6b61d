"""Columns that travel from a list to the hits: their names and types, resolved while a plan is made.

A column has one type for the whole run: bool, int (64 bit), float or text. What a source gives decides:
its own types, and for a CSV, which has none, what all of its cells can be read as. Mixed values become
text, nested ones JSON text, dates ISO text; NaN, and an empty cell among numbers, become null.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ckn_scale.errors import InputError
from ckn_scale.storage.image_refs import ImageRef

RESERVED = frozenset(
    {"image_id", "uri", "size_bytes", "etag", "thumbnail"}  # of tables
    | {"score", "rank", "match", "inliers", "box", "transform", "columns"}  # of hits
)
NULL = "null"  # no value was seen yet: the first one, maybe of a later segment, gives the type
ARROW_TYPES = {
    NULL: pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
}
_INT = re.compile(r"-?(0|[1-9]\d{0,18})", re.ASCII)  # 007 and +1 are codes, not numbers
_FLOAT = re.compile(r"-?(0|[1-9]\d*)?(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)
_BOOLS = {"true": True, "false": False}


class Cell(str):
    """Text of a CSV: `12` in it may be a number."""

    __slots__ = ()


def check_names(keep: Sequence[str]) -> None:
    """InputError for a name that tables and hits have for something else."""
    if taken := [name for name in keep if name in RESERVED]:
        raise InputError(
            f"a kept column cannot be named {', '.join(taken)}, which hits and tables have themselves: "
            "rename it in the list"
        )


class KeptColumns:
    """Watches the values of the kept columns go by, then gives each column its type."""

    def __init__(self, names: Sequence[str]) -> None:
        check_names(names)
        self.names = tuple(dict.fromkeys(names))
        self._typed = dict.fromkeys(self.names, NULL)
        self._cells = dict.fromkeys(self.names, NULL)

    def watch(self, refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
        """The same images, with values that JSON keeps as they are."""
        for ref in refs:
            given = ref.columns or {}
            columns = {name: self._take(name, given.get(name), ref.uri) for name in self.names}
            yield ImageRef(ref.uri, ref.size_bytes, ref.etag, columns or None)

    def resolve_types(self, before: Mapping[str, str] | None) -> dict[str, str]:
        """The type of every column of the run; `before` are those of its plan so far, None without one.

        InputError when what was seen does not fit the plan.
        """
        if before is None:
            return {name: _join(self._typed[name], self._cells[name]) for name in self.names}
        if new := [name for name in self.names if name not in before]:
            raise InputError(
                f"the run keeps {', '.join(before) or 'no column'}: {', '.join(new)} cannot be added by an "
                "append; index into another run folder to keep it"
            )
        return {name: self._fit(name, kind) if name in self.names else kind for name, kind in before.items()}

    def _fit(self, name: str, kind: str) -> str:
        """The type after this segment of a column that had `kind` before."""
        typed, cells = self._typed[name], self._cells[name]
        new = typed if kind == "text" and typed in (NULL, "text") else _join(typed, cells)
        if kind == NULL or new in (NULL, kind) or (kind, new) == ("float", "int"):
            return new if kind == NULL else kind
        raise InputError(
            f"the column {name} holds {kind} in this run, and {new} here: make it {kind}, or index into "
            "another run folder"
        )

    def _take(self, name: str, value: Any, uri: str) -> Any:
        """The value as JSON keeps it, its type noted."""
        if isinstance(value, Cell):
            self._cells[name] = _join(self._cells[name], _kind_of_cell(value))
            return str(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            raise InputError(f"the column {name} holds bytes (of {uri}): keep text or numbers")
        plain = _to_plain(value)
        self._typed[name] = _join(self._typed[name], _kind_of_plain(plain))
        return plain


def convert(value: Any, kind: str) -> Any:
    """A watched value in the type that its column was given."""
    if value is None or kind == NULL or (value == "" and kind != "text"):
        return None
    if kind == "text":
        return value if isinstance(value, str) else json.dumps(value)
    if kind == "bool":
        return _BOOLS[value.lower()] if isinstance(value, str) else value
    return int(value) if kind == "int" else float(value)


def to_arrow(values: Sequence[Any], kind: str) -> pa.Array:
    return pa.array([convert(value, kind) for value in values], ARROW_TYPES[kind])


def _join(one: str, other: str) -> str:
    """The narrowest type that holds both."""
    if one == other or other == NULL:
        return one
    if one == NULL:
        return other
    return "float" if {one, other} == {"int", "float"} else "text"


def _kind_of_cell(cell: str) -> str:
    if not cell:
        return NULL
    if cell.lower() in _BOOLS:
        return "bool"
    if _INT.fullmatch(cell):
        return "int" if _is_int64(int(cell)) else "text"
    is_float = cell[-1].isdigit() and _FLOAT.fullmatch(cell) and not _INT.fullmatch(cell)
    return "float" if is_float and math.isfinite(float(cell)) else "text"


def _kind_of_plain(value: Any) -> str:
    if value is None:
        return NULL
    return {bool: "bool", int: "int", float: "float", str: "text"}[type(value)]


def _to_plain(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if _is_int64(value) else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, datetime.timedelta)):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # JSON can spell what UTF-8 cannot


def _is_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63
