"""API keys: who may ask for what, and how often. A key is held as its sha256 only.

Each is a line of a file (`serve --api-key-file`), or an entry of $CKN_SCALE_API_KEYS between commas:

    3f9c61…                                 may search
    3f9c61… scope=metrics                   may read /metrics and nothing else
    3f9c61… scope=search+metrics rate=5/s   at most 5 searches a second, 5 at once
    sha256:9f86d0… rate=600/min             the file holds the key's hash only
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field

from ckn_scale.errors import InputError

Scope: TypeAlias = Literal["search", "metrics"]
HASHED = "sha256:"
PERIODS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_HASH = re.compile(r"[0-9a-f]{64}")
_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|min|h)")


class ApiKey(BaseModel):
    """What a key may do. `count` requests in `period_s` seconds, where it has a rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=_HASH.pattern)
    scopes: tuple[Scope, ...] = ("search",)
    count: int | None = Field(default=None, ge=1)
    period_s: float = Field(default=1.0, gt=0)

    @property
    def name(self) -> str:
        """What logs call it."""
        return self.sha256[:8]


def parse_keys(lines: Iterable[str]) -> tuple[ApiKey, ...]:
    """The keys of a file's lines or of the variable's entries; `#` begins a line that is none.

    InputError, which never shows a key, for an option that is none and for a key that is there twice.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parse_key(line, f"API key {number}")
        if key.sha256 in keys:
            raise InputError(f"API key {number} is there twice")
        keys[key.sha256] = key
    return tuple(keys.values())


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find_key(given: str, keys: Sequence[ApiKey]) -> ApiKey | None:
    """The key that was given, among those known; the time it takes reveals nothing."""
    found = hash_key(given)
    matches = [hmac.compare_digest(found, known.sha256) for known in keys]
    return next((key for key, matched in zip(keys, matches, strict=True) if matched), None)


def _parse_key(line: str, where: str) -> ApiKey:
    secret, options = line.strip(), {}
    while option := re.search(r"(?:^|\s)(scope|rate)=(\S*)$", secret):
        if option[1] in options:
            raise InputError(f"{where} has two options {option[1]}=")
        secret, options[option[1]] = secret[: option.start()].strip(), option[2]
    if not secret:
        raise InputError(f"{where} has options and no key")
    count, period_s = _parse_rate(options["rate"], where) if "rate" in options else (None, 1.0)
    scopes = _parse_scopes(options.get("scope", "search"), where)
    return ApiKey(sha256=_read_hash(secret, where), scopes=scopes, count=count, period_s=period_s)


def _read_hash(secret: str, where: str) -> str:
    if not secret.startswith(HASHED):
        return hash_key(secret)
    digits = secret.removeprefix(HASHED).lower()
    if not _HASH.fullmatch(digits):
        raise InputError(f"{where} begins with {HASHED}, and 64 hexadecimal digits must follow")
    return digits


def _parse_scopes(text: str, where: str) -> tuple[Scope, ...]:
    scopes = tuple(scope for scope in get_args(Scope) if scope in text.split("+"))
    if set(scopes) != set(text.split("+")):
        raise InputError(f"{where}: scope is search, metrics or search+metrics, got {text!r}")
    return scopes


def _parse_rate(text: str, where: str) -> tuple[int, float]:
    rate = _RATE.fullmatch(text)
    if rate is None:
        raise InputError(f"{where}: a rate is a number per s, min or h, as rate=5/s, got {text!r}")
    return int(rate[1]), PERIODS_S[rate[2]]
