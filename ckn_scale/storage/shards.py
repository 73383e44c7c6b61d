"""Commits: the records that make the files of a shard count.

Readers open only files that a valid record names. Repair and retry create the next generation.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckn_scale.errors import CorruptData
from ckn_scale.storage.records import READERS, create_record, map_in_threads, read_record
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile

_SHARED: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
_COMMIT_NAME = re.compile(r"(\d{5,})\.(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Commit:
    """One shard of one step, done: what was written, by whom, and what it replaces.

    A process holds those of all shards, 10⁵ and more, so what repeats is held once; none is ever altered.
    """

    step: str
    shard_id: int
    generation: int
    attempt: str
    fingerprint: str
    files: dict[str, StoredFile]  # by stage
    states: dict[str, int] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)  # host, pid, device
    seconds: float = 0.0
    started_at: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    supersedes: int | None = None  # the generation it replaces
    reason: str | None = None  # and why

    def to_body(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any], where: str) -> Commit:
        """CorruptData when the body is not that of a commit."""
        try:
            known = {name: body[name] for name in cls.__slots__ if name in body}
            for name in ("step", "fingerprint"):
                known[name] = sys.intern(known[name])
            for name in ("states", "worker", "report"):
                known[name] = _share(known.get(name, {}))
            files = {sys.intern(stage): StoredFile(**entry) for stage, entry in known.pop("files").items()}
            return cls(files=files, **known)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptData(f"{where} is not a commit record ({error})") from error


class ShardLog:
    """The commit records `<prefix>/00012.1.json` of one step: shard 12, generation 1.

    Records never change, so each is read once; what others have committed since is found by listing.
    """

    def __init__(self, store: Store, prefix: str, step: str) -> None:
        self.store = store
        self.prefix = prefix
        self.step = step
        self._known: dict[int, Commit] = {}  # the highest valid generation read so far, by shard id

    def path(self, shard_id: int, generation: int) -> str:
        return f"{self.prefix}/{shard_id:05d}.{generation}.json"

    def committed(self) -> dict[int, Commit]:
        """The highest valid generation of every shard, by shard id: a listing, and what is new is read."""
        listed, unread = self._list()
        # Decoding takes the interpreter's lock: threads hide the latency of an object store, and slow a disk.
        readers = 1 if self.store.is_local else READERS
        map_in_threads(lambda item: self._read_highest(*item), unread.items(), readers)
        return {shard_id: self._known[shard_id] for shard_id in sorted(listed) if shard_id in self._known}

    def get(self, shard_id: int) -> Commit | None:
        """The highest valid generation of one shard. Generations have no gaps, so nothing is listed."""
        known = self._known.get(shard_id)
        generation = 1 if known is None else known.generation + 1
        while True:
            try:
                self._read(shard_id, generation)
            except FileNotFoundError:
                return self._known.get(shard_id)
            except CorruptData:
                pass  # the one before it counts
            generation += 1

    def find_damaged(self) -> dict[tuple[int, int], str]:
        """What is wrong with records above the highest valid one of their shard, by shard and generation.

        Those below it were superseded: nobody reads them.
        """
        self.committed()
        damage: dict[tuple[int, int], str] = {}
        for shard_id, generations in self._list()[1].items():
            for generation in generations:
                try:
                    self._read(shard_id, generation)  # valid: committed since
                except FileNotFoundError:
                    continue
                except CorruptData as error:
                    damage[shard_id, generation] = str(error)
        return damage

    def commit(self, offered: Commit) -> tuple[Commit, bool]:
        """Make a shard count: (the commit that counts, whether it is the one offered).

        An invalid record keeps its generation, so the offer moves on to the next one.
        """
        while True:
            path = self.path(offered.shard_id, offered.generation)
            try:
                created = create_record(self.store, path, offered.to_body())
            except CorruptData as error:
                damaged, reason = offered.generation, offered.reason or str(error)
                offered = replace(offered, generation=damaged + 1, supersedes=damaged, reason=reason)
                continue
            if created.won:
                return Commit.from_body(created.record, path), True
            return self.get(offered.shard_id) or Commit.from_body(created.record, path), False

    def _list(self) -> tuple[set[int], dict[int, list[int]]]:
        """The shards that have records, and the generations of each above the one that is known."""
        listed: set[int] = set()
        unread: dict[int, list[int]] = defaultdict(list)
        for path in self.store.list(self.prefix, recursive=False):
            if match := _COMMIT_NAME.fullmatch(path.rpartition("/")[2]):
                shard_id, generation = int(match[1]), int(match[2])
                listed.add(shard_id)
                known = self._known.get(shard_id)
                if known is None or generation > known.generation:
                    unread[shard_id].append(generation)
        return listed, unread

    def _read_highest(self, shard_id: int, generations: Sequence[int]) -> None:
        for generation in sorted(generations, reverse=True):
            try:
                self._read(shard_id, generation)
                return
            except (CorruptData, FileNotFoundError):
                continue

    def _read(self, shard_id: int, generation: int) -> None:
        path = self.path(shard_id, generation)
        commit = Commit.from_body(read_record(self.store, path), path)
        if (commit.step, commit.shard_id, commit.generation) != (self.step, shard_id, generation):
            raise CorruptData(f"{path} holds the record of another shard or generation")
        self._known[shard_id] = commit


def _share(words: dict[str, Any]) -> dict[str, Any]:
    """One object for all records that say the same: most shards have the same states and few workers."""
    try:
        return _SHARED.setdefault(tuple(words.items()), words)
    except TypeError:  # a report that holds lists
        return words


def find_size_mismatches(store: Store, commits: Iterable[Commit]) -> list[int]:
    """Shards with a file that is gone or has another size: found by listing, without reading any."""
    commits = list(commits)
    folders = {file.path.split("/")[0] for commit in commits for file in commit.files.values()}
    sizes = {path: size for folder in sorted(folders) for path, size in store.list_sizes(folder).items()}
    return [
        commit.shard_id
        for commit in commits
        if any(sizes.get(file.path) != file.size_bytes for file in commit.files.values())
    ]
