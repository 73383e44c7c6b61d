"""Numbered records, written once and never altered; the highest valid number is the truth.

A record is a JSON object with the attempt that wrote it and a checksum of itself. One that is
torn or altered is invalid: readers pass over it and say so, and its number stays used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ckn_scale.errors import CorruptData
from ckn_scale.storage.store import Store

log = logging.getLogger(__name__)

READERS = 32  # parallel reads of records: enough to hide the latency of an object store
_NAME = re.compile(r"(\d{6,})\.json")
Item = TypeVar("Item")
Value = TypeVar("Value")


class Record(Protocol):
    """A dataclass whose fields, but for its number, are the body of a numbered record."""

    @property
    def number(self) -> int: ...

    @classmethod
    def from_body(cls: type[Value], number: int, body: Mapping[str, Any]) -> Value: ...

    def to_body(self) -> dict[str, Any]: ...


RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True)
class Created(Generic[Item]):
    """The record that is there now, and whether it is the one just offered."""

    record: Item
    won: bool


def new_attempt() -> str:
    """A name that no other attempt has, in any process on any machine."""
    return uuid.uuid4().hex


def encode_record(body: dict[str, Any]) -> bytes:
    """The bytes of a record: `body` in a canonical form, with its checksum."""
    plain = {key: value for key, value in body.items() if key != "checksum"}
    return _canonical({**plain, "checksum": _checksum(plain)}, indent=1)


def decode_record(data: bytes, where: str) -> dict[str, Any]:
    """The body; CorruptData when the bytes are not a whole record."""
    try:
        body: dict[str, Any] = json.loads(data)
        checksum = body.pop("checksum")
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CorruptData(f"{where} is not a whole record ({type(error).__name__})") from error
    if checksum != _checksum(body):
        raise CorruptData(f"{where} was altered: its checksum does not fit")
    return body


def create_record(store: Store, path: str, body: dict[str, Any]) -> Created[dict[str, Any]]:
    """Offer a body; the one that is there now is returned. CorruptData when an invalid one holds the name."""
    offered = {"attempt": new_attempt(), **body}
    data = encode_record(offered)
    if store.create(path, data):
        return Created(decode_record(data, path), won=True)
    found = read_record(store, path)
    return Created(found, won=found.get("attempt") == offered["attempt"])


def read_record(store: Store, path: str) -> dict[str, Any]:
    return decode_record(store.read(path), store.address(path))


def map_in_threads(
    call: Callable[[Item], Value], items: Iterable[Item], readers: int = READERS
) -> list[Value]:
    """`call` of each item, in order, by at most `readers` threads."""
    items = list(items)
    if min(readers, len(items)) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(readers, len(items))) as pool:
        return list(pool.map(call, items))


class RecordLog(Generic[RecordT]):
    """The records `<prefix>/000001.json`, `<prefix>/000002.json`, … of one kind."""

    def __init__(self, store: Store, prefix: str, kind: type[RecordT]) -> None:
        self.store = store
        self.prefix = prefix
        self.kind = kind
        self._warned: set[int] = set()  # damaged records that were warned of: a server looks every second

    def path(self, number: int) -> str:
        return f"{self.prefix}/{number:06d}.json"

    def read(self, number: int) -> RecordT:
        """One record; CorruptData when it is invalid, FileNotFoundError when there is none."""
        return self._parse(number, read_record(self.store, self.path(number)))

    def create(self, record: RecordT, *, attempt: str | None = None) -> Created[RecordT]:
        """Offer a record under its number; CorruptData when an invalid record holds that number."""
        if record.number < 1:
            raise ValueError(f"record numbers start at 1, got {record.number}")
        body = {"attempt": attempt or new_attempt(), **record.to_body()}
        created = create_record(self.store, self.path(record.number), body)
        return Created(self._parse(record.number, created.record), created.won)

    def append(self, record: RecordT) -> int:
        """Write a record under the next free number, whatever its own, and return that number."""
        attempt, number = new_attempt(), self.next_number()
        while not self._wins(number, record, attempt):
            number += 1
        return number

    def next_number(self) -> int:
        """After all that are in use: a damaged record keeps its number."""
        return max(self.numbers(), default=0) + 1

    def latest(self) -> RecordT | None:
        """The highest valid record; a warning names those above it that are damaged."""
        damage: dict[int, str] = {}
        found = None
        for number in reversed(self.numbers()):
            found = self._read_or_note(number, damage)
            if found is not None:
                break
        self._warn(
            damage, f"{self.path(found.number)} is used instead" if found else "there is none before it"
        )
        return found

    def all(self) -> list[RecordT]:
        """Every valid record, lowest number first; a warning names those that are damaged."""
        records, damage = self.read_all()
        self._warn(damage, "it is left out")
        return records

    def read_all(self) -> tuple[list[RecordT], dict[int, str]]:
        """Every valid record, and what is wrong with each of the others by its number."""
        damage: dict[int, str] = {}
        found = map_in_threads(lambda number: self._read_or_note(number, damage), self.numbers())
        return [record for record in found if record is not None], damage

    def numbers(self) -> list[int]:
        """The numbers in use, valid or not, ascending."""
        names = [path.rpartition("/")[2] for path in self.store.list(self.prefix, recursive=False)]
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _parse(self, number: int, body: dict[str, Any]) -> RecordT:
        try:
            return self.kind.from_body(number, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = self.store.address(self.path(number))
            raise CorruptData(
                f"{where} is not a record of its kind ({type(error).__name__}: {error})"
            ) from error

    def _read_or_note(self, number: int, damage: dict[int, str]) -> RecordT | None:
        try:
            return self.read(number)
        except FileNotFoundError:
            return None
        except CorruptData as error:
            damage[number] = str(error)
            return None

    def _warn(self, damage: dict[int, str], instead: str) -> None:
        for number in sorted(damage.keys() - self._warned):
            log.warning("%s; %s", damage[number], instead)
        self._warned.update(damage)

    def _wins(self, number: int, record: RecordT, attempt: str) -> bool:
        try:
            body = {"attempt": attempt, **record.to_body()}
            return create_record(self.store, self.path(number), body).won
        except CorruptData:
            return False  # a damaged record keeps its number


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _canonical(body: dict[str, Any], indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else None
    text = json.dumps(body, sort_keys=True, indent=indent, separators=separators, allow_nan=False)
    return text.encode()
