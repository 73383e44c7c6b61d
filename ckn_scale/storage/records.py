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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ckn_scale.errors import CorruptData
from ckn_scale.storage.store import Store

log = logging.getLogger(__name__)

READERS = 32  # parallel reads of records: enough to hide the latency of an object store
_NAME = re.compile(r"(\d{6,})\.json")
Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Created:
    """The record that stands, and whether it is the one just offered."""

    body: dict[str, Any]
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
        body = json.loads(data)
        checksum = body.pop("checksum")
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CorruptData(f"{where} is not a whole record ({type(error).__name__})") from error
    if checksum != _checksum(body):
        raise CorruptData(f"{where} was altered: its checksum does not fit")
    return body


def create_record(store: Store, path: str, body: dict[str, Any]) -> Created:
    """Offer a record; what stands is returned. CorruptData when an invalid one holds the name."""
    offered = {"attempt": new_attempt(), **body}
    data = encode_record(offered)
    if store.create(path, data):
        return Created(decode_record(data, path), won=True)
    standing = read_record(store, path)
    return Created(standing, won=standing.get("attempt") == offered["attempt"])


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


class RecordLog:
    """The records `<prefix>/000001.json`, `<prefix>/000002.json`, …"""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self._told: set[int] = set()  # damaged records that were warned of: a server looks every second

    def path(self, number: int) -> str:
        return f"{self.prefix}/{number:06d}.json"

    def read(self, number: int) -> dict[str, Any]:
        """One record; CorruptData when it is invalid, FileNotFoundError when there is none."""
        return read_record(self.store, self.path(number))

    def create(self, number: int, body: dict[str, Any]) -> Created:
        """Offer record `number`; CorruptData when an invalid record holds that number."""
        if number < 1:
            raise ValueError(f"record numbers start at 1, got {number}")
        return create_record(self.store, self.path(number), body)

    def append(self, body: dict[str, Any]) -> int:
        """Write `body` under the next free number, and return it."""
        offered = {"attempt": new_attempt(), **body}
        number = max(self.numbers(), default=0) + 1
        while not self._wins(number, offered):
            number += 1
        return number

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """The highest valid record; a warning names those above it that are damaged."""
        damage: dict[int, str] = {}
        standing = None
        for number in reversed(self.numbers()):
            body = self._read_or_note(number, damage)
            if body is not None:
                standing = number, body
                break
        self._warn(
            damage, f"{self.path(standing[0])} is used instead" if standing else "none before it stands"
        )
        return standing

    def all(self) -> list[tuple[int, dict[str, Any]]]:
        """Every valid record, lowest number first; a warning names those that are damaged."""
        records, damage = self.read_all()
        self._warn(damage, "it is left out")
        return records

    def read_all(self) -> tuple[list[tuple[int, dict[str, Any]]], dict[int, str]]:
        """Every valid record, and what is wrong with each of the others by its number."""
        damage: dict[int, str] = {}
        numbers = self.numbers()
        bodies = map_in_threads(lambda number: self._read_or_note(number, damage), numbers)
        records = [(number, body) for number, body in zip(numbers, bodies, strict=True) if body is not None]
        return records, damage

    def numbers(self) -> list[int]:
        """The numbers in use, valid or not, ascending."""
        names = [path.rpartition("/")[2] for path in self.store.list(self.prefix, recursive=False)]
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _read_or_note(self, number: int, damage: dict[int, str]) -> dict[str, Any] | None:
        try:
            return self.read(number)
        except FileNotFoundError:
            return None
        except CorruptData as error:
            damage[number] = str(error)
            return None

    def _warn(self, damage: dict[int, str], instead: str) -> None:
        for number in sorted(damage.keys() - self._told):
            log.warning("%s; %s", damage[number], instead)
        self._told.update(damage)

    def _wins(self, number: int, body: dict[str, Any]) -> bool:
        try:
            return self.create(number, body).won
        except CorruptData:
            return False  # a damaged record keeps its number


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _canonical(body: dict[str, Any], indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else None
    text = json.dumps(body, sort_keys=True, indent=indent, separators=separators, allow_nan=False)
    return text.encode()
