"""Is a run whole? Every record and every file that one names is read; nothing is changed.

First the records, then the files they name and what these hold: each planned id once, each image in one
state, each usable image in one row of the current index, each dead one that it still holds among its
tombstones. Shard by shard, so that memory stays that of a few shards. Superseded generations, samples that
were removed after publishing and what a purge removed are not asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

from ckn_scale.errors import CorruptData
from ckn_scale.runs.check_files import (
    MALFORMED,
    WRONG,
    CurrentIndex,
    EncodedShard,
    Finding,
    check_deletion,
    check_draw,
    check_plan_file,
    check_position,
    check_tombstones,
    compare_bytes,
    number_of,
)
from ckn_scale.storage.builds import cut_index_shards, number_index_shards
from ckn_scale.storage.deletions import find_dead
from ckn_scale.storage.index_files import IndexManifest, read_manifest
from ckn_scale.storage.plans import SHARDS_PER_FILE, count_shards, find_segment
from ckn_scale.storage.run_folder import (
    AUGMENT_INDEX,
    BUILD_INDEX,
    CERTIFY_INDEX,
    ENCODE_IMAGES,
    MAKE_CODES,
    PLANT_QUERIES,
    RunFolder,
    is_of_sample,
)
from ckn_scale.storage.run_records import Deletion, Generation, Purge, Segment, Version
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile, read_file

THREADS = 4  # so many shards are read at once, and lie in memory
COPY = "put a copy of it back"


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
        self.deletions: list[Deletion] = run.deletions.read_all()[0]
        self.purges: dict[int, Purge] = {one.number: one for one in run.purges.read_all()[0]}
        # Of versions before the purge that the current one comes after, records and manifests are left.
        self.living = [one for one in self.versions if self.current and one.purge >= self.current.purge]
        self.commits: dict[str, dict[int, Commit]] = {
            label: run.commits(label).committed() for label in run.logs()
        }
        self.encoded, self.built = (self.commits.get(step, {}) for step in (ENCODE_IMAGES, BUILD_INDEX))
        augmented = self.commits.get(AUGMENT_INDEX, {}).values()
        self.augmented = {file.path for commit in augmented for file in commit.files.values()}
        self.generations: list[Generation] = run.models.read_all()[0]
        self.learned = bool(self.generations)
        self.manifests: dict[int, IndexManifest] = {}  # by version
        self.opened: dict[str, IndexManifest | None] = {}  # by path
        self.named: dict[str, _Check] = {}  # files whose bytes are compared, by path
        self.result = Verification(
            version=self.current.number if self.current else None,
            images=sum(segment.num_images for segment in self.listed),
        )
        self.rebuild = f"`ckn-scale index IMAGES {run.url} --check` rebuilds it"
        self.remove_samples = f"`ckn-scale gc {run.url} --samples` removes it: the models are learned"
        self.replan = f"{COPY}, or use another run folder (`--models {run.url}` spares learning)"

    @cached_property
    def numbers_now(self) -> set[int]:
        """The index shards that the encoded images make; none while some are missing."""
        if any(shard_id not in self.encoded for shard_id in range(count_shards(self.segments))):
            return set()
        purge = self.purges[max(self.purges)] if self.purges else None
        return set(number_index_shards(self.run, self.segments, self.encoded, purge))

    def report(self, path: str, what: str, remedy: str, *, needed: bool = True) -> None:
        (self.result.problems if needed else self.result.notes).append(Finding(path, what, remedy))

    # Records

    def check_records(self) -> None:
        run, again = self.run, "call `ckn-scale index` again"
        removal = {
            run.plan.prefix: self.replan,
            run.deletions.prefix: f"{COPY}: images that it deleted would come back without it",
            run.purges.prefix: f"{COPY}; or purge again, and remove it",
            run.background.prefix: f"{COPY}, or remove it: the models are learned" if self.learned else COPY,
            run.models.prefix: f"{COPY}; or {again}, which records the models once more, and remove it",
            run.numerics.prefix: f"{COPY}, or remove it: the next worker that computes records its own",
            run.versions.prefix: f"{COPY}; or {again}, which publishes what is missing, and remove it",
        }
        logs = (run.plan, run.deletions, run.purges, run.background, run.models, run.numerics, run.versions)
        for log in logs:
            valid, damage = log.read_all()
            self.result.records += len(valid)
            for number in sorted(damage):
                self.report(log.path(number), "it is not a valid record", removal[log.prefix])
        self._check_segments()
        self._check_deletions(removal[run.deletions.prefix])
        self._check_commits()
        for version in reversed(self.versions):
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

    def _check_deletions(self, remedy: str) -> None:
        """None is missing up to the last that a version takes into account."""
        known = {one.number for one in self.deletions}
        highest = max([*known, *(version.deletions for version in self.versions)], default=0)
        damaged = self.run.deletions.read_all()[1].keys()
        for number in sorted(set(range(1, highest + 1)) - known - damaged):
            self.report(self.run.deletions.path(number), "it is gone", remedy)

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
        path = version.manifest.path
        if path not in self.opened:
            self.opened[path] = self._read_manifest(version)
        manifest = self.opened[path]  # of several versions after a rollback
        if manifest is None:
            return
        self.manifests[version.number] = manifest
        planned = sum(one.num_images for one in self.segments if one.number <= version.segments)
        compared = {
            "builds": (manifest.build, version.build),
            "rows": (manifest.rows, version.rows),
            "rows, and images that are ok": (manifest.rows, version.states.get("ok", 0)),
            "images in some state, and planned ones": (sum(version.states.values()), planned),
        }
        for what, (found, expected) in compared.items():
            if found != expected and version.segments <= len(self.segments):
                record = self.run.versions.path(version.number)
                self.report(record, f"{what}: {found} and {expected} do not agree", WRONG)

    def _read_manifest(self, version: Version) -> IndexManifest | None:
        try:
            manifest = read_manifest(self.run.store, version.manifest)
        except (CorruptData, *MALFORMED) as error:
            later = {self.manifests[number].build for number in self.manifests if number > version.number}
            remedy = "`ckn-scale index` publishes its build again" if version is self.current else COPY
            what = f"version {version.number} cannot be opened: {error}"
            self.report(version.manifest.path, what, remedy, needed=version.build not in later)
            return None
        self.result.files += 1
        self.result.size_bytes += version.manifest.size_bytes
        return manifest

    # Files that records name

    def list_checks(self) -> list[_Check]:
        """Each file once. Tables that are looked into come first, of others the bytes are compared."""
        content = [
            *self._list_plan_checks(),
            *self._list_deletion_checks(),
            *self._list_position_checks(),
        ]
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

    def _name(self, file: StoredFile, remedy: str, *, needed: bool = True) -> None:
        """The first record that names a file decides what is said about it."""
        call = partial(compare_bytes, self.run.store, file, remedy)
        self.named.setdefault(file.path, _Check([file], call, needed))

    def _name_index_files(self) -> None:
        """The current version's first. What was rebuilt since is only missed by those before it."""
        for version in reversed(self.living):
            manifest = self.manifests.get(version.number)
            if manifest is None:
                continue
            if manifest.tombstones is not None:
                self._name(manifest.tombstones, COPY)
            for file in (one for shard in manifest.shards for one in shard.files):
                number = number_of(file)
                commit = self.built.get(number)
                rebuilt = commit is not None and file not in commit.files.values()
                rebuilt = rebuilt and file.path not in self.augmented
                remedy = f"{COPY}: version {version.number} cannot be restored without it"
                if version is self.current or number in self.numbers_now:
                    remedy = self.rebuild
                self._name(file, remedy, needed=version is self.current or not rebuilt)
            for file in manifest.models.values():
                self._name(file, COPY)

    def _name_certificates(self) -> None:
        """What the current version's queries came to: the next one takes it over. Older ones are history."""
        remedy = f"{COPY}, or do nothing: the next version is then asked all its queries anew"
        for version in reversed(self.living):
            needed = version is self.current
            outcomes, draw = version.certificate.outcomes, version.certificate.draw
            if outcomes is not None:
                self._name(outcomes, remedy, needed=needed)
            for file in self._list_query_files(outcomes) if outcomes and needed else ():
                self._name(file, remedy)
            if draw:
                file = StoredFile(self.run.draw_path(draw), "", 0)
                call = partial(check_draw, self.run, draw, f"{COPY}: it says what was asked")
                self.named.setdefault(file.path, _Check([file], call, needed))

    def _list_query_files(self, outcomes: StoredFile) -> list[StoredFile]:
        try:
            body = json.loads(read_file(self.run.store, outcomes))
            return [StoredFile(**one["file"]) for one in body["outcomes"]]
        except (CorruptData, *MALFORMED):
            return []  # its bytes are compared later

    def _name_committed(self) -> None:
        """What commits name and nothing above: data of images, and what was needed on the way to them."""
        drawn, samples = {one.certificate.draw for one in self.versions}, set(self.run.list_samples())
        purged = self.current is not None and self.current.purge > 0
        for label, commits in self.commits.items():
            step, _, draw = label.partition("-")
            asked_before = step == PLANT_QUERIES and draw in drawn
            past = asked_before or (_is_learning(label) and self.learned)
            for commit in commits.values():
                record = self.run.commits(label).path(commit.shard_id, commit.generation)
                unused = step in (BUILD_INDEX, MAKE_CODES) and commit.shard_id not in self.numbers_now
                if purged and (unused or step in (PLANT_QUERIES, AUGMENT_INDEX)):
                    continue  # what of it is needed still, versions name
                stale = past or unused
                remedy = f"{COPY}, or remove {record}, too: nothing needs it now" if stale else self.rebuild
                for file in commit.files.values():
                    if not (self.learned and is_of_sample(file.path)):
                        self._name(file, remedy, needed=not asked_before)
                    elif file.path in samples:  # else it was removed after publishing
                        self._name(file, self.remove_samples)

    def _list_plan_checks(self) -> Iterator[_Check]:
        for segment in self.segments:
            size = SHARDS_PER_FILE * segment.images_per_shard
            for position, file in enumerate(segment.files):
                first = segment.first_id + position * size
                ids = range(first, min(first + size, segment.next_id))
                call = partial(check_plan_file, self.run.store, file, ids, self.replan)
                yield _Check([file], call)

    def _list_deletion_checks(self) -> Iterator[_Check]:
        """What was deleted, and that the current version holds none of it."""
        planned = sum(segment.num_images for segment in self.segments)
        for record in self.deletions:
            call = partial(check_deletion, self.run.store, record.ids, planned, COPY)
            yield _Check([record.ids], call)
        manifest = self.manifests.get(self.current.number) if self.current else None
        if manifest is None or self.current is None or self.current.segments > len(self.segments):
            return
        records = [one for one in self.deletions if one.number <= self.current.deletions]
        segments, files = self.segments[: self.current.segments], [manifest.tombstones]

        def check() -> list[Finding]:
            try:
                dead = find_dead(self.run, segments, records).ids
            except CorruptData:
                return []  # said of the file itself
            return check_tombstones(self.run.store, manifest, dead, COPY)

        yield _Check([file for file in files if file is not None], check)

    def _list_position_checks(self) -> Iterator[_Check]:
        """One for each index shard that the encoded images make, or will, with these images."""
        index = self._open_current()
        latest = max(self.purges, default=0)
        purge = self.purges.get(self.current.purge if index is not None and self.current else latest)
        for position, shards in enumerate(cut_index_shards(self.run, self.segments, purge)):
            held = index.find(position, shards) if index else None
            if index is not None and held is None and shards.start < index.num_shards:
                path = self.run.versions.path(self.result.version or 0)
                self.report(path, f"its manifest has no index shard {position}", WRONG)
            if held is not None and not held.is_recent:
                what = "images that it holds, or lacks, were encoded again since it was published"
                self.report(held.shard.index.path, what, "`ckn-scale index` publishes them", needed=False)
            encoded = [
                EncodedShard(self.encoded[one], range(*find_segment(self.segments, one).ids_of_shard(one)))
                for one in shards
                if one in self.encoded
            ]
            files = [one.vectors for one in encoded]
            files += held.shard.files if held else []
            yield _Check(files, partial(check_position, self.run.store, encoded, held, self.rebuild))

    def _open_current(self) -> CurrentIndex | None:
        """None without a version, or when its manifest or part of its plan is damaged."""
        version = self.current
        if version is None or version.number not in self.manifests or version.segments > len(self.segments):
            return None
        return CurrentIndex(self.manifests[version.number], self.segments[: version.segments], self.encoded)


def _is_learning(label: str) -> bool:
    return not label.startswith((ENCODE_IMAGES, BUILD_INDEX, AUGMENT_INDEX, PLANT_QUERIES, CERTIFY_INDEX))
