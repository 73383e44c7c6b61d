"""Is a run whole? Every record and every file that one names is read; nothing is changed.

First the records, then the files they name and what these hold: each planned id once, each image in one
state, each usable image in one row of the current index. Shard by shard, so that memory stays that of a
few shards. Superseded generations and samples that were removed after publishing are not asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.numerics import import_faiss
from ckn_scale.core.vector_index import wrap_index
from ckn_scale.errors import CknScaleError, CorruptData, TransientStoreError
from ckn_scale.schemas import IMAGE_STATES
from ckn_scale.steps.draw_queries import read_draw
from ckn_scale.storage.builds import number_index_shard, number_index_shards
from ckn_scale.storage.index_files import IndexManifest, IndexShard, read_manifest
from ckn_scale.storage.plans import SHARDS_PER_FILE, count_shards, find_segment, list_replaced
from ckn_scale.storage.run_folder import (
    BUILD_INDEX,
    CERTIFY_INDEX,
    ENCODE_IMAGES,
    PLANT_QUERIES,
    VECTORS_STAGE,
    RunFolder,
    is_of_sample,
    parse_data_path,
)
from ckn_scale.storage.run_records import Generation, Segment, Version
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile, decode_table, read_file

THREADS = 4  # so many shards are read at once, and lie in memory
CHUNK_BYTES = 8 * 2**20
IDS_SHOWN = 3
COPY = "put a copy of it back"
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


@dataclass
class Verification:
    """What was read, and what is wrong with it."""

    version: int | None = None  # the current one
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)  # unfinished, or damaged and not needed any more
    records: int = 0
    files: int = 0
    size_bytes: int = 0
    images: int = 0


def verify_run(
    run: RunFolder, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Look at everything; `on_progress` is called with the files that are read and those there are."""
    verifier = _Verifier(run)
    verifier.check_records()
    checks = verifier.list_checks()
    result, done, total = verifier.result, 0, sum(len(check.files) for check in checks)
    with ThreadPoolExecutor(THREADS) as pool:
        for check, findings in zip(checks, pool.map(lambda check: check.call(), checks), strict=True):
            (result.problems if check.needed else result.notes).extend(findings)
            result.size_bytes += sum(file.size_bytes for file in check.files)
            done += len(check.files)
            on_progress(done, total)
    result.files += done
    return result


@dataclass(frozen=True)
class _Check:
    """Some files, and a call that says what is wrong with them."""

    files: Sequence[StoredFile]
    call: Callable[[], list[Finding]]
    needed: bool = True  # else what is found is a note


class _Verifier:
    """Records are read when it is made; `list_checks` then says what is to be read of the files."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.listed: list[Segment] = run.plan.read_all()[0]
        self.segments: list[Segment] = []  # up to a gap
        self.versions: list[Version] = run.versions.read_all()[0]
        self.current = self.versions[-1] if self.versions else None
        self.commits: dict[str, dict[int, Commit]] = {
            label: run.commits(label).committed() for label in run.logs()
        }
        self.encoded, self.built = (self.commits.get(step, {}) for step in (ENCODE_IMAGES, BUILD_INDEX))
        self.generations: list[Generation] = run.models.read_all()[0]
        self.learned = bool(self.generations)
        self.manifests: dict[int, IndexManifest] = {}  # by version
        self.named: dict[str, _Check] = {}  # files whose bytes are compared, by path
        self.result = Verification(
            version=self.current.number if self.current else None,
            images=sum(segment.num_images for segment in self.listed),
        )
        self.rebuild = f"`ckn-scale index IMAGES {run.url} --check` rebuilds it"
        self.replan = f"{COPY}, or use another run folder (`--models {run.url}` spares learning)"

    @cached_property
    def numbers_now(self) -> set[int]:
        """The index shards that the encoded images make; none while some are missing."""
        if any(shard_id not in self.encoded for shard_id in range(count_shards(self.segments))):
            return set()
        return set(number_index_shards(self.run, self.segments, self.encoded))

    def report(self, path: str, what: str, remedy: str, *, needed: bool = True) -> None:
        (self.result.problems if needed else self.result.notes).append(Finding(path, what, remedy))

    # Records

    def check_records(self) -> None:
        run, again = self.run, "call `ckn-scale index` again"
        removal = {
            run.plan.prefix: self.replan,
            run.background.prefix: f"{COPY}, or remove it: the models are learned" if self.learned else COPY,
            run.models.prefix: f"{COPY}; or {again}, which records the models once more, and remove it",
            run.numerics.prefix: f"{COPY}, or remove it: the next worker that computes records its own",
            run.versions.prefix: f"{COPY}; or {again}, which publishes what is missing, and remove it",
        }
        for log in (run.plan, run.background, run.models, run.numerics, run.versions):
            valid, damage = log.read_all()
            self.result.records += len(valid)
            for number in sorted(damage):
                self.report(log.path(number), "it is not a valid record", removal[log.prefix])
        self._check_segments()
        self._check_commits()
        for version in self.versions:
            self._check_version(version)

    def _check_segments(self) -> None:
        """None is missing up to the last that is published; of those after a gap nobody knows the ids."""
        known = {segment.number for segment in self.listed}
        highest = max([*known, *(version.segments for version in self.versions)], default=0)
        for number in sorted(set(range(1, highest + 1)) - known - self.run.plan.read_all()[1].keys()):
            self.report(self.run.plan.path(number), "it is gone", self.replan)
        next_id, next_shard = 0, 0
        for number, segment in enumerate(self.listed, start=1):
            if segment.number != number:
                return
            if (segment.first_id, segment.first_shard) != (next_id, next_shard):
                self.report(self.run.plan.path(number), "its ids do not follow those before it", WRONG)
                return
            next_id, next_shard = segment.next_id, segment.next_shard
            self.segments.append(segment)

    def _check_commits(self) -> None:
        """Damaged ones, and those that are missing though what they say is published."""
        damaged_shards: set[int] = set()
        for label, commits in self.commits.items():
            self.result.records += len(commits)
            log = self.run.commits(label)
            for shard_id, generation in sorted(log.find_damaged()):
                damaged_shards |= {shard_id} if label == ENCODE_IMAGES else set()
                redone = label == ENCODE_IMAGES or (label == BUILD_INDEX and shard_id in self.numbers_now)
                remedy = "`ckn-scale index` does its shard again"
                if not redone and (self.learned or not _is_learning(label)):
                    remedy = f"{COPY}, or remove it: nothing needs it now"
                self.report(log.path(shard_id, generation), "it is not a valid record", remedy)
        published = max((version.segments for version in self.versions), default=0)
        for segment in self.segments:
            shards = range(segment.first_shard, segment.next_shard)
            missing = [one for one in shards if one not in self.encoded and one not in damaged_shards]
            if missing and segment.number > published:
                what = f"{len(missing)} of its {len(shards)} shards are not encoded yet"
                path = self.run.plan.path(segment.number)
                self.report(path, what, "`ckn-scale index` goes on", needed=False)
                continue
            for shard_id in missing:
                first, end = segment.ids_of_shard(shard_id)
                what = f"it is gone: no record says what became of images {first} to {end - 1}"
                path = self.run.commits(ENCODE_IMAGES).path(shard_id, 1)
                self.report(path, what, "`ckn-scale index` encodes them again")

    def _check_version(self, version: Version) -> None:
        """Its manifest, which is kept, and whether the numbers of both and of the plan agree."""
        try:
            manifest = read_manifest(self.run.store, version.manifest)
        except (CorruptData, *MALFORMED) as error:
            again = any(one.build == version.build and one.number > version.number for one in self.versions)
            remedy = "`ckn-scale index` publishes its build again" if version is self.current else COPY
            what = f"version {version.number} cannot be opened: {error}"
            self.report(version.manifest.path, what, remedy, needed=not again)
            return
        self.manifests[version.number] = manifest
        self.result.files += 1
        self.result.size_bytes += version.manifest.size_bytes
        planned = sum(one.num_images for one in self.segments if one.number <= version.segments)
        usable = version.states.get("ok", 0) - manifest.extra["replaced"]
        compared = {
            "builds": (manifest.build, version.build),
            "rows": (manifest.rows, version.rows),
            "rows, and images that are ok and not replaced": (manifest.rows, usable),
            "images in some state, and planned ones": (sum(version.states.values()), planned),
        }
        for what, (found, expected) in compared.items():
            if found != expected and version.segments <= len(self.segments):
                path = self.run.versions.path(version.number)
                self.report(path, f"{what}: {found} and {expected} do not agree", WRONG)

    # Files that records name

    def list_checks(self) -> list[_Check]:
        """Each file once. Tables that are looked into come first, of others the bytes are compared."""
        content = [*self._list_plan_checks(), *self._list_position_checks()]
        for segment in self.listed:
            for file in (*segment.files, segment.sample, segment.queries):
                self._name(file, self.replan)
        for background in self.run.background.read_all()[0]:
            self._name(background.images, f"{COPY}: only learning models again needs it")
        for generation in reversed(self.generations):
            source = generation.taken_from
            for file in generation.models.values():
                self._name(file, f"copy it again from {source}" if source else self.rebuild)
        self._name_index_files()
        self._name_certificates()
        self._name_committed()
        looked_into = {file.path for check in content for file in check.files}
        return [*content, *(check for path, check in self.named.items() if path not in looked_into)]

    def _name(self, file: StoredFile, remedy: str, *, needed: bool = True, may_be_gone: bool = False) -> None:
        """The first record that names a file decides what is said about it."""
        call = partial(self._compare_bytes, file, remedy, may_be_gone)
        self.named.setdefault(file.path, _Check([file], call, needed))

    def _name_index_files(self) -> None:
        """The current version's first. What was rebuilt since is only missed by those before it."""
        for version in reversed(self.versions):
            manifest = self.manifests.get(version.number)
            if manifest is None:
                continue
            for file in (one for shard in manifest.shards for one in (shard.index, shard.table)):
                number = _number_of(file)
                commit = self.built.get(number)
                rebuilt = commit is not None and file not in commit.files.values()
                remedy = f"{COPY}: version {version.number} cannot be restored without it"
                if version is self.current or number in self.numbers_now:
                    remedy = self.rebuild
                self._name(file, remedy, needed=version is self.current or not rebuilt)
            for file in manifest.models.values():
                self._name(file, COPY)

    def _name_certificates(self) -> None:
        """What the current version's queries came to: the next one takes it over. Older ones are history."""
        remedy = f"{COPY}, or do nothing: the next version is then asked all its queries anew"
        for version in reversed(self.versions):
            needed, outcomes, draw = (
                version is self.current,
                version.certificate.outcomes,
                version.certificate.draw,
            )
            if outcomes is not None:
                self._name(outcomes, remedy, needed=needed)
            for file in self._list_query_files(outcomes) if outcomes and needed else ():
                self._name(file, remedy)
            if draw:
                file = StoredFile(self.run.draw_path(draw), "", 0)
                self.named.setdefault(file.path, _Check([file], partial(self._check_draw, draw), needed))

    def _list_query_files(self, outcomes: StoredFile) -> list[StoredFile]:
        try:
            body = json.loads(read_file(self.run.store, outcomes))
            return [StoredFile(**one["file"]) for one in body["outcomes"]]
        except (CorruptData, *MALFORMED):
            return []  # its bytes are compared later

    def _name_committed(self) -> None:
        """What commits name and nothing above: data of images, and what was needed on the way to them."""
        drawn = {version.certificate.draw for version in self.versions}
        for label, commits in self.commits.items():
            step, _, draw = label.partition("-")
            asked_before = step == PLANT_QUERIES and draw in drawn
            past = asked_before or (_is_learning(label) and self.learned)
            for commit in commits.values():
                record = self.run.commits(label).path(commit.shard_id, commit.generation)
                stale = past or (step == BUILD_INDEX and commit.shard_id not in self.numbers_now)
                remedy = f"{COPY}, or remove {record}, too: nothing needs it now" if stale else self.rebuild
                for file in commit.files.values():
                    if self.learned and is_of_sample(file.path):
                        removal = (
                            f"`ckn-scale gc {self.run.url} --samples` removes it: the models are learned"
                        )
                        self._name(file, removal, may_be_gone=True)
                    else:
                        self._name(file, remedy, needed=not asked_before)

    def _list_plan_checks(self) -> Iterator[_Check]:
        for segment in self.segments:
            size = SHARDS_PER_FILE * segment.images_per_shard
            for position, file in enumerate(segment.files):
                first = segment.first_id + position * size
                ids = np.arange(first, min(first + size, segment.next_id))
                yield _Check([file], partial(self._check_plan_file, file, ids))

    def _list_position_checks(self) -> Iterator[_Check]:
        """One for each index shard that the encoded images make, or will, with these images."""
        size, total = int(self.run.settings["index"]["shards_per_index_shard"]), count_shards(self.segments)
        index = self._open_current()
        for position in range(-(-total // size)):
            shards = range(position * size, min((position + 1) * size, total))
            held = index.find(position, shards) if index else None
            if index is not None and held is None and shards.start < index.total:
                self.report(index.path, f"it has no index shard {position}", WRONG)
            if held is not None and not held.is_recent:
                what = "images that it holds, or lacks, were encoded again since it was published"
                self.report(held.shard.index.path, what, "`ckn-scale index` publishes them", needed=False)
            files = [self.encoded[one].files[VECTORS_STAGE] for one in shards if one in self.encoded]
            files += [held.shard.index, held.shard.table] if held else []
            yield _Check(files, partial(self._check_position, shards, held))

    def _open_current(self) -> _CurrentIndex | None:
        """None without a version, or when its manifest or part of its plan is damaged."""
        version = self.current
        if version is None or version.number not in self.manifests or version.segments > len(self.segments):
            return None
        manifest, segments = self.manifests[version.number], self.segments[: version.segments]
        return _CurrentIndex(version.manifest.path, manifest, segments, self.encoded)

    # What files hold; these run in threads

    def _compare_bytes(self, file: StoredFile, remedy: str, may_be_gone: bool) -> list[Finding]:
        findings: list[Finding] = []
        with _collect(findings, file.path, remedy):
            if not may_be_gone or self.run.store.exists(file.path):
                for _ in self._read_chunks(file):
                    pass
        return findings

    def _check_draw(self, draw: str) -> list[Finding]:
        findings: list[Finding] = []
        with _collect(findings, self.run.draw_path(draw), f"{COPY}: it says what the version was asked"):
            read_draw(self.run, draw)
        return findings

    def _check_plan_file(self, file: StoredFile, expected: np.ndarray) -> list[Finding]:
        findings: list[Finding] = []
        with _collect(findings, file.path, self.replan):
            table = decode_table(b"".join(self._read_chunks(file)), ["image_id"])
            _require_ids(table.column("image_id").to_numpy(), expected)
        return findings

    def _check_position(self, shards: range, held: _HeldShard | None) -> list[Finding]:
        findings: list[Finding] = []
        usable: dict[int, np.ndarray] = {}  # ids of images that are ok, by encoded shard
        for shard_id in (one for one in shards if one in self.encoded):
            file = self.encoded[shard_id].files[VECTORS_STAGE]
            with _collect(findings, file.path, self.rebuild):
                usable[shard_id] = self._read_usable(shard_id, file)
        if held is None:
            return findings
        expected = held.expect_ids(usable)
        for file, read_ids in ((held.shard.index, held.read_index), (held.shard.table, held.read_table)):
            with _collect(findings, file.path, self.rebuild):
                ids = read_ids(b"".join(self._read_chunks(file)))
                held.require_form(ids)
                expected = ids if expected is None else expected  # at least, both hold the same
                _require_ids(ids, expected)
        return findings

    def _read_usable(self, shard_id: int, file: StoredFile) -> np.ndarray:
        """The ids that are ok; ValueError unless each planned image of the shard has one state."""
        table = decode_table(b"".join(self._read_chunks(file)), ["image_id", "state", "vector"])
        ids, states = table.column("image_id").to_numpy(), table.column("state")
        _require_ids(ids, np.arange(*find_segment(self.segments, shard_id).ids_of_shard(shard_id)))
        counts = Counter(states.to_pylist())
        if not counts.keys() <= set(IMAGE_STATES):
            raise ValueError(f"it has states that there are not: {sorted(counts.keys() - set(IMAGE_STATES))}")
        if counts != Counter(self.encoded[shard_id].states):
            raise ValueError(f"it has {dict(counts)}, its record says {self.encoded[shard_id].states}")
        is_ok = pc.equal(states, "ok")
        if is_ok != pc.is_valid(table.column("vector")):
            raise ValueError("images that are ok have no vector, or others have one")
        usable: np.ndarray = ids[is_ok.to_numpy()]
        return usable

    def _read_chunks(self, file: StoredFile) -> Iterator[bytes]:
        """Its bytes; CorruptData, at the latest after them, when they are not the recorded ones."""
        size, digest = self.run.store.size(file.path), hashlib.sha256()
        if size != file.size_bytes:
            raise CorruptData(f"it is damaged: it has {size} bytes, {file.size_bytes} were recorded")
        for start in range(0, size, CHUNK_BYTES):
            chunk = self.run.store.read_range(file.path, start, CHUNK_BYTES)
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != file.sha256:
            raise CorruptData("it is damaged: its sha256 is not the recorded one")


class _CurrentIndex:
    """The index of the current version, and the images it was made of."""

    def __init__(
        self, path: str, manifest: IndexManifest, segments: Sequence[Segment], encoded: Mapping[int, Commit]
    ) -> None:
        self.path, self.manifest, self.segments, self.encoded = path, manifest, segments, encoded
        self.replaced, self.total = list_replaced(segments), count_shards(segments)
        self._shards = {shard.shard: shard for shard in manifest.shards}

    def find(self, position: int, shards: range) -> _HeldShard | None:
        """The index shard at a position, made of those of `shards` that the version holds."""
        shard = self._shards.get(position)
        if shard is None:
            return None
        shards = range(shards.start, min(shards.stop, self.total))
        commits = [self.encoded[one] for one in shards if one in self.encoded]
        number = number_index_shard(position, commits, self.segments, self.replaced) if commits else -1
        return _HeldShard(shard, self, shards, is_recent=number == _number_of(shard.index))


@dataclass(frozen=True)
class _HeldShard:
    shard: IndexShard
    index: _CurrentIndex
    shards: range  # encoded ones
    is_recent: bool  # whether it was built of what is committed of them now

    def expect_ids(self, usable: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """What it has to hold; None when that is not known."""
        if not self.is_recent or any(shard_id not in usable for shard_id in self.shards):
            return None
        return np.setdiff1d(np.concatenate([usable[one] for one in self.shards]), self.index.replaced)

    def require_form(self, ids: np.ndarray) -> None:
        """ValueError unless the ids are those of a shard of its rows and range, and none of them replaced."""
        if (np.diff(ids) <= 0).any():
            raise ValueError("its ids do not ascend")
        ends = (int(ids[0]), int(ids[-1])) if len(ids) else (-1, -1)
        if (len(ids), *ends) != (self.shard.rows, self.shard.first_id, self.shard.last_id):
            said = f"{self.shard.rows} rows, ids {self.shard.first_id} to {self.shard.last_id}"
            raise ValueError(f"it has {len(ids)} rows, ids {ends[0]} to {ends[1]}; the manifest says {said}")
        if np.isin(ids, self.index.replaced).any():
            raise ValueError("it holds images that were replaced")

    def read_index(self, data: bytes) -> np.ndarray:
        opened = import_faiss().deserialize_index(np.frombuffer(data, np.uint8))
        return wrap_index(opened, self.index.manifest.kind, self.index.manifest.dim).ids

    def read_table(self, data: bytes) -> np.ndarray:
        ids: np.ndarray = pa.ipc.open_file(pa.BufferReader(data)).read_all().column("image_id").to_numpy()
        return ids


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


def _is_learning(label: str) -> bool:
    return not label.startswith((ENCODE_IMAGES, BUILD_INDEX, PLANT_QUERIES, CERTIFY_INDEX))


def _number_of(file: StoredFile) -> int:
    """Of the index shard that a file belongs to."""
    named = parse_data_path(file.path)
    return named[1] if named else -1
