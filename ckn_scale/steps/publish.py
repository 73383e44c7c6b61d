"""Publish: a certified build becomes the current version, by one numbered record.

One rule for all who publish. The version number is read first, then the plan, the models and the
commits; what they name is built and certified; the record is created under the number after the one
that was read, and only while plan, models and commits still name the same. Else whoever publishes
starts over. So a version never holds less of the plan than the one before it, however long a process
slept, and of two that publish the same one record remains. Only a rollback goes back (`runs/versions.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckn_scale.config import parse_settings
from ckn_scale.errors import CorruptData, RunFailed
from ckn_scale.failpoints import hit_failpoint
from ckn_scale.schemas import DEAD_STATES
from ckn_scale.step import check_fingerprint
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.builds import name_build
from ckn_scale.storage.deletions import (
    NO_DEAD,
    DeadImages,
    adjust_states,
    find_dead,
    find_tombstones,
    read_deletions,
)
from ckn_scale.storage.index_files import IndexManifest, IndexShard, read_ids, read_manifest
from ckn_scale.storage.models import read_generation
from ckn_scale.storage.plans import count_shards, require_segments
from ckn_scale.storage.records import map_in_threads
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Certificate, Failures, Purge, Segment, Version
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """What the records of a run name at one moment: what a version published now has to hold."""

    after: int  # the highest version number in use
    segments: tuple[Segment, ...]
    generation: int
    encoded: Mapping[int, Commit]
    build: str
    current: Version | None = field(compare=False)  # the version that is published now
    deletions: int = 0  # records of them
    purge: Purge | None = None
    dead: DeadImages = field(default=NO_DEAD, compare=False)
    adjusted: Mapping[int, Mapping[str, int]] = field(
        default_factory=dict, compare=False
    )  # states, with these

    @property
    def purge_number(self) -> int:
        return self.purge.number if self.purge else 0

    @property
    def states(self) -> dict[str, int]:
        return self.states_of(self.segments)

    def states_of(self, segments: Iterable[Segment]) -> dict[str, int]:
        states: Counter[str] = Counter()
        for segment in segments:
            for shard_id in range(segment.first_shard, segment.next_shard):
                states.update(self.adjusted.get(shard_id, self.encoded[shard_id].states))
        return dict(sorted(states.items()))


def read_candidate(run: RunFolder) -> Candidate:
    """RunFailed while images are not encoded; RunMismatch when another release encoded some of them."""
    after = max(run.versions.numbers(), default=0)  # first, so that what is read next is not older
    latest = run.versions.latest()
    segments = tuple(require_segments(run))
    generation = read_generation(run).number
    step = EncodeImages(run)
    shards = range(count_shards(segments))
    encoded = {one: commit for one, commit in step.log.committed().items() if one in shards}
    for commit in encoded.values():
        check_fingerprint(step, commit)
    deletions, purge = read_deletions(run), run.purges.latest()
    build, dead = name_build(run, segments, encoded, purge), find_dead(run, segments, deletions)
    adjusted = adjust_states(run, segments, encoded, dead)
    known = (after, segments, generation, encoded, build, latest)
    candidate = Candidate(*known, len(deletions), purge, dead, adjusted)
    planned, counted = sum(segment.num_images for segment in segments), sum(candidate.states.values())
    if counted != planned:
        raise RunFailed(f"{run.url}: {planned} images planned, {counted} have a state")
    return candidate


def is_current(run: RunFolder, candidate: Candidate) -> bool:
    """Whether the records of the run still name the same."""
    try:
        return read_candidate(run) == candidate
    except RunFailed:
        return False  # images were appended and are not encoded yet


def count_failures(candidate: Candidate, limit: float) -> Failures:
    """What a candidate's images came to, beside the share of failures that may be published."""
    held = candidate.current.segments if candidate.current else 0
    new = candidate.states_of(one for one in candidate.segments if one.number > held)
    old = candidate.states_of(one for one in candidate.segments if one.number <= held)
    before = candidate.current.states if candidate.current else {}
    failed = {state: count for state, count in new.items() if state not in ("ok", *DEAD_STATES)}
    died = max(0, sum(old.get(state, 0) - before.get(state, 0) for state in DEAD_STATES))
    lost = max(0, before.get("ok", 0) - old.get("ok", 0) - died)
    return Failures(sum(new.values()), failed, before.get("ok", 0), lost, limit)


def require_few_failures(run: RunFolder, candidate: Candidate) -> None:
    """RunFailed when more than publish.max_failed_share of the new images could not be used."""
    failures = count_failures(candidate, _max_failed_share(run))
    if failures.share <= failures.limit:
        return
    parts = []
    if failures.new_failed:
        states = ", ".join(f"{count} {state}" for state, count in failures.new_failed.items())
        bad = sum(failures.new_failed.values())
        parts.append(f"{bad} of {failures.new_images} new images could not be used ({states})")
    if failures.lost:
        parts.append(f"{failures.lost} of {failures.held_images} published images cannot be used any more")
    raise RunFailed(
        f"not published: {' and '.join(parts)}, more than publish.max_failed_share = {failures.limit:g}; "
        f"`ckn-scale failures {run.url}` lists them and with --retry tries them again, "
        "`--accept` publishes all the same, on record"
    )


def _max_failed_share(run: RunFolder) -> float:
    return parse_settings(run.settings).publish.max_failed_share


def publish_version(
    run: RunFolder,
    candidate: Candidate,
    manifest: StoredFile,
    certificate: Certificate,
    *,
    accept: bool = False,
) -> int:
    """The number of the version that now is current. `accept` publishes what a gate refused, on record.

    RunFailed when the run changed since the candidate was read: then start over.
    """
    if not accept:
        require_few_failures(run, candidate)
    if not certificate.passed and not accept:
        raise RunFailed(_explain_refusal(certificate))
    content = read_manifest(run.store, manifest)
    _check_rows(candidate, content)
    version = Version(
        number=candidate.after + 1,
        build=candidate.build,
        manifest=manifest,
        rows=content.rows,
        segments=candidate.segments[-1].number,
        generation=candidate.generation,
        states=candidate.states,
        deletions=candidate.deletions,
        purge=candidate.purge_number,
        failures=count_failures(candidate, _max_failed_share(run)),
        certificate=replace(certificate, accepted=accept and not certificate.passed),
    )
    if is_current(run, candidate):
        hit_failpoint("data_written", "publish", version.number)
        if _create_once(run, version):
            log.info("version %d is build %s", version.number, version.build)
            return version.number
    raise RunFailed(
        f"{run.url}: images were appended, encoded, deleted or published by another process meanwhile"
    )


def _create_once(run: RunFolder, version: Version) -> bool:
    """Whether its number holds this manifest: of this process, or of another that had the same."""
    try:
        recorded = run.versions.create(version).record
    except CorruptData:
        return False  # a damaged record keeps its number
    return recorded.manifest.sha256 == version.manifest.sha256


def find_published(run: RunFolder, candidate: Candidate, shards: Sequence[IndexShard]) -> int | None:
    """The current version, if it is this build, names these index files and holds nothing dead."""
    latest = run.versions.latest()
    wanted = (candidate.build, candidate.deletions, candidate.purge_number)
    if latest is None or (latest.build, latest.deletions, latest.purge) != wanted:
        return None
    try:
        manifest = read_manifest(run.store, latest.manifest)
        tombstones = read_ids(run.store, manifest.tombstones)
        dead = find_tombstones(run.store, shards, candidate.dead.ids)
    except CorruptData:
        return None
    same = _without_codes(manifest) == list(shards) and np.array_equal(tombstones, dead)
    return latest.number if same else None


def only_deletes(run: RunFolder, candidate: Candidate, shards: Sequence[IndexShard]) -> bool:
    """Whether all that the current version lacks of a candidate are deletions."""
    current = candidate.current
    if current is None or current.deletions >= candidate.deletions:
        return False
    held = (current.build, current.segments, current.generation, current.purge)
    wanted = (candidate.build, len(candidate.segments), candidate.generation, candidate.purge_number)
    try:
        manifest = read_manifest(run.store, current.manifest)
    except CorruptData:
        return False
    return held == wanted and _without_codes(manifest) == list(shards)


def _without_codes(manifest: IndexManifest) -> list[IndexShard]:
    """Its shards as they are built; short codes are made of them later."""
    return [replace(shard, codes=None) for shard in manifest.shards]


def _check_rows(candidate: Candidate, manifest: IndexManifest) -> None:
    usable = candidate.states.get("ok", 0)
    if manifest.rows != usable:
        raise RunFailed(
            f"not published: build {candidate.build} has {manifest.rows} rows, but {usable} images are ok, "
            "neither deleted nor replaced"
        )


def _explain_refusal(certificate: Certificate) -> str:
    if certificate.queries == 0:
        return "not published: no planted query could be asked; `--accept` publishes all the same"
    return (
        f"not published: {certificate.first} of {certificate.queries} planted queries came back first; "
        f"with confidence {certificate.confidence:g} that is at least {certificate.lower:.3f}, "
        f"below publish.target = {certificate.target:g}. More keypoints or words raise it, more "
        "publish.num_queries narrow the interval, `--accept` publishes all the same, on record"
    )


def remove_samples(run: RunFolder) -> None:
    """What the models were learned from: needed no more once a version with them is published.

    Whoever still learns (another driver, or to repair a damaged model) finds them gone and draws them again.
    """
    paths = run.list_samples()
    if paths and run.models.latest() is not None:
        remove_files(run, paths)


def remove_files(run: RunFolder, paths: Sequence[str]) -> None:
    map_in_threads(run.store.delete, paths)
    run.events.write("garbage_removed", files=len(paths))
    run.events.flush()
