"""What the files of a run hold, against what its records say of them. Each call reads a few files.

A file that is gone, damaged or holds something else is a Finding with its path and what to do. A store that
fails in a way that may pass says nothing about a file: that is raised.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.vector_index import wrap_index
from ckn_scale.errors import CknScaleError, CorruptData, TransientStoreError
from ckn_scale.schemas import IMAGE_STATES
from ckn_scale.steps.draw_queries import read_draw
from ckn_scale.storage.builds import number_index_shard
from ckn_scale.storage.deletions import NO_IDS, find_tombstones
from ckn_scale.storage.index_files import IndexManifest, IndexShard
from ckn_scale.storage.plans import count_shards
from ckn_scale.storage.point_files import read_point_ids
from ckn_scale.storage.run_folder import VECTORS_STAGE, RunFolder, parse_data_path
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, decode_table

CHUNK_BYTES = 8 * 2**20
IDS_SHOWN = 3
WRONG = "its bytes are those that were recorded, so this is a bug: index into another run folder"
MALFORMED = (ValueError, KeyError, TypeError, RuntimeError, pa.ArrowException)


@dataclass(frozen=True)
class Finding:
    """Something wrong, and what to do about it."""

    path: str  # of a record or file, below the run's root
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.remedy}"


def compare_bytes(store: Store, file: StoredFile, remedy: str) -> list[Finding]:
    """Whether a file has the size and sha256 that were recorded; a part of it is in memory at a time."""
    findings: list[Finding] = []
    with _collect(findings, file.path, remedy):
        for _ in _read_chunks(store, file):
            pass
    return findings


def check_draw(run: RunFolder, draw: str, remedy: str) -> list[Finding]:
    """A draw of queries has the content that it is named by."""
    findings: list[Finding] = []
    with _collect(findings, run.draw_path(draw), remedy):
        read_draw(run, draw)
    return findings


def check_plan_file(store: Store, file: StoredFile, ids: range, remedy: str) -> list[Finding]:
    """A table of planned images has these ids, each once and in order."""
    findings: list[Finding] = []
    with _collect(findings, file.path, remedy):
        table = decode_table(_read(store, file), ["image_id"])
        _require_ids(table.column("image_id").to_numpy(), np.arange(ids.start, ids.stop))
    return findings


@dataclass(frozen=True)
class EncodedShard:
    """A committed shard of `encode_images`, and the ids that were planned for it."""

    commit: Commit
    ids: range

    @property
    def vectors(self) -> StoredFile:
        return self.commit.files[VECTORS_STAGE]

    def read_usable(self, store: Store) -> np.ndarray:
        """The ids of images that are ok; ValueError unless each planned image has one state."""
        table = decode_table(_read(store, self.vectors), ["image_id", "state", "vector"])
        ids, states = table.column("image_id").to_numpy(), table.column("state")
        _require_ids(ids, np.arange(self.ids.start, self.ids.stop))
        counts = Counter(states.to_pylist())
        if not counts.keys() <= set(IMAGE_STATES):
            raise ValueError(f"it has states that there are not: {sorted(counts.keys() - set(IMAGE_STATES))}")
        if counts != Counter(self.commit.states):
            raise ValueError(f"it has {dict(counts)}, its record says {self.commit.states}")
        is_ok = pc.equal(states, "ok")
        if is_ok != pc.is_valid(table.column("vector")):
            raise ValueError("images that are ok have no vector, or others have one")
        usable: np.ndarray = ids[is_ok.to_numpy()]
        return usable


class CurrentIndex:
    """The index of a version, and the images that it was made of."""

    def __init__(
        self, manifest: IndexManifest, segments: Sequence[Segment], encoded: Mapping[int, Commit]
    ) -> None:
        self.manifest, self.encoded, self.num_shards = manifest, encoded, count_shards(segments)
        self._shards = {shard.shard: shard for shard in manifest.shards}

    def find(self, position: int, shards: range) -> HeldShard | None:
        """The index shard at a position, made of those of the encoded `shards` that the version holds."""
        shard = self._shards.get(position)
        if shard is None:
            return None
        shards = range(shards.start, min(shards.stop, self.num_shards))
        commits = [self.encoded[one] for one in shards if one in self.encoded]
        number = number_index_shard(position, commits) if commits else -1
        return HeldShard(shard, self, shards, is_recent=number == number_of(shard.index))


@dataclass(frozen=True)
class HeldShard:
    """An index shard of the current version."""

    shard: IndexShard
    index: CurrentIndex
    shards: range  # the encoded ones that it was made of
    is_recent: bool  # whether it was built of what is committed of them now

    def expect_ids(self, usable: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """What it has to hold, by the usable ids of each encoded shard; None when that is not known."""
        if not self.is_recent or any(shard_id not in usable for shard_id in self.shards):
            return None
        expected: np.ndarray = np.concatenate([usable[one] for one in self.shards])
        return expected

    def require_form(self, ids: np.ndarray) -> None:
        """ValueError unless ids ascend and have the rows and range of the manifest."""
        if (np.diff(ids) <= 0).any():
            raise ValueError("its ids do not ascend")
        ends = (int(ids[0]), int(ids[-1])) if len(ids) else (-1, -1)
        if (len(ids), *ends) != (self.shard.rows, self.shard.first_id, self.shard.last_id):
            said = f"{self.shard.rows} rows, ids {self.shard.first_id} to {self.shard.last_id}"
            raise ValueError(f"it has {len(ids)} rows, ids {ends[0]} to {ends[1]}; the manifest says {said}")

    def read_index(self, data: bytes) -> np.ndarray:
        opened = import_faiss().deserialize_index(np.frombuffer(data, np.uint8))
        return wrap_index(opened, self.index.manifest.kind, self.index.manifest.dim).ids

    def read_ids(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, "<i8")

    def read_table(self, data: bytes) -> np.ndarray:
        ids: np.ndarray = pa.ipc.open_file(pa.BufferReader(data)).read_all().column("image_id").to_numpy()
        return ids


def check_position(
    store: Store, encoded: Sequence[EncodedShard], held: HeldShard | None, remedy: str
) -> list[Finding]:
    """Encoded shards, and the index shard that is made of them, if the current version has it."""
    findings: list[Finding] = []
    usable: dict[int, np.ndarray] = {}
    for one in encoded:
        with _collect(findings, one.vectors.path, remedy):
            usable[one.commit.shard_id] = one.read_usable(store)
    if held is None:
        return findings
    expected = held.expect_ids(usable)
    shard, readers = held.shard, (held.read_index, held.read_table, held.read_ids, read_point_ids)
    for file, read_ids in zip((shard.index, shard.table, shard.ids, shard.points), readers, strict=True):
        if file is None:
            continue
        with _collect(findings, file.path, remedy):
            ids = read_ids(_read(store, file))
            held.require_form(ids)
            expected = ids if expected is None else expected  # at least, all hold the same
            _require_ids(ids, expected)
    return findings


def check_tombstones(store: Store, manifest: IndexManifest, dead: np.ndarray, remedy: str) -> list[Finding]:
    """The tombstones of a version are the dead images that its index shards hold."""
    findings: list[Finding] = []
    file = manifest.tombstones
    with _collect(findings, file.path if file else manifest.shards[0].ids.path, remedy):
        found = np.frombuffer(_read(store, file), "<i8") if file else NO_IDS
        _require_ids(found, find_tombstones(store, manifest.shards, dead))
    return findings


def check_deletion(store: Store, file: StoredFile, num_planned: int, remedy: str) -> list[Finding]:
    """A record of deletions names planned images, each once and in order."""
    findings: list[Finding] = []
    with _collect(findings, file.path, remedy):
        ids = np.frombuffer(_read(store, file), "<i8")
        if len(ids) and (ids[0] < 0 or ids[-1] >= num_planned or (np.diff(ids) <= 0).any()):
            raise ValueError("its ids are not planned images in ascending order, each once")
    return findings


def number_of(file: StoredFile) -> int:
    """Of the index shard that a file belongs to."""
    named = parse_data_path(file.path)
    return named[1] if named else -1


def _read(store: Store, file: StoredFile) -> bytes:
    return b"".join(_read_chunks(store, file))


def _read_chunks(store: Store, file: StoredFile) -> Iterator[bytes]:
    """Its bytes; CorruptData, at the latest after them, when they are not the recorded ones."""
    size, digest = store.size(file.path), hashlib.sha256()
    if size != file.size_bytes:
        raise CorruptData(f"it is damaged: it has {size} bytes, {file.size_bytes} were recorded")
    for start in range(0, size, CHUNK_BYTES):
        chunk = store.read_range(file.path, start, CHUNK_BYTES)
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise CorruptData("it is damaged: its sha256 is not the recorded one")


@contextmanager
def _collect(findings: list[Finding], path: str, remedy: str) -> Iterator[None]:
    """What is found wrong with a file joins the findings; a store that fails ends all of it."""
    try:
        yield
    except FileNotFoundError:
        findings.append(Finding(path, "it is gone", remedy))
    except TransientStoreError:
        raise
    except CorruptData as error:
        findings.append(Finding(path, str(error), remedy))
    except MALFORMED as error:
        findings.append(Finding(path, str(error), WRONG))
    except (CknScaleError, OSError) as error:
        findings.append(Finding(path, f"it cannot be read ({error})", remedy))


def _require_ids(found: np.ndarray, expected: np.ndarray) -> None:
    """ValueError, which names some of them, unless the ids are the expected ones in their order."""
    if np.array_equal(found, expected):
        return
    for what, ids in (
        ("it lacks images", np.setdiff1d(expected, found)),
        ("it holds images that do not belong there", np.setdiff1d(found, expected)),
    ):
        if len(ids):
            shown = ", ".join(map(str, ids[:IDS_SHOWN]))
            raise ValueError(
                f"{what}: {shown}{f' and {len(ids) - IDS_SHOWN} more' if len(ids) > IDS_SHOWN else ''}"
            )
    raise ValueError("its ids are not in ascending order, each once")
