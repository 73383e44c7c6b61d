"""How far a run is: shards done per step, images by state, failures. Reads records, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ckn_scale.errors import CorruptData
from ckn_scale.schemas import DEAD_STATES, IMAGE_STATES
from ckn_scale.steps.draw_queries import draw_queries
from ckn_scale.storage.builds import name_shards, number_index_shards
from ckn_scale.storage.deletions import DeadImages, adjust_states, find_dead, read_deletions
from ckn_scale.storage.plans import PlanReader, count_shards, find_segment, read_segments
from ckn_scale.storage.run_folder import (
    AUGMENT_INDEX,
    BUILD_INDEX,
    CERTIFY_INDEX,
    DRAW_REFERENCES,
    ENCODE_IMAGES,
    FIND_COPIES,
    LEARN_QUANTISER,
    MAKE_CODES,
    MEASURE_SHORTLIST,
    PLANT_QUERIES,
    VECTORS_STAGE,
    RunFolder,
)
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import read_table

_COMPRESSING = (LEARN_QUANTISER, MAKE_CODES, MEASURE_SHORTLIST)
_FAILURES = tuple(state for state in IMAGE_STATES if state not in ("ok", *DEAD_STATES))
_FINDING_COPIES = (DRAW_REFERENCES, FIND_COPIES)
AFTER_LEARNING = (
    ENCODE_IMAGES,
    BUILD_INDEX,
    AUGMENT_INDEX,
    PLANT_QUERIES,
    CERTIFY_INDEX,
    *_COMPRESSING,
    *_FINDING_COPIES,
)


def summarise_run(run: RunFolder) -> dict[str, Any]:
    """The form that `ckn-scale status --json` prints; scripts rely on `steps` and `images`.

    With a damaged plan nobody knows how many shards there are: no steps then, and `damaged` says why.
    """
    logs = (run.models, run.purges, run.versions)
    damaged = [what for log in logs for what in log.read_all()[1].values()]
    encoded = run.commits(ENCODE_IMAGES).committed()
    adjusted: dict[int, dict[str, int]] = {}
    try:
        segments = read_segments(run)
        dead = find_dead(run, segments, read_deletions(run))
        adjusted = adjust_states(run, segments, encoded, dead)
        steps = list(_list_steps(run, segments, encoded, dead)) if segments else []
    except CorruptData as damage:
        segments, steps = run.plan.read_all()[0], []
        damaged.append(str(damage))
    states: Counter[str] = Counter()
    for shard_id, commit in encoded.items():
        states.update(adjusted.get(shard_id, commit.states))
    latest = run.versions.latest()
    estimates = [event for event in run.events.read_all() if event["kind"] == "estimate"]
    return {
        "run": run.url,
        "steps": steps,
        "images": {
            "planned": sum(segment.num_images for segment in segments),
            "states": dict(sorted(states.items())),
        },
        "peak_memory_mb": max(
            (commit.worker.get("peak_memory_mb", 0) for commit in encoded.values()), default=0
        ),
        "estimate": estimates[-1] if estimates else None,
        "version": None if latest is None else latest.number,
        "rows": None if latest is None else latest.rows,
        "restores": None if latest is None else latest.restores,
        "certificate": None if latest is None else latest.certificate.to_body(),
        "damaged": damaged,
    }


def list_failures(run: RunFolder, state: str | None = None) -> Iterator[dict[str, Any]]:
    """Every image that could not be used: id, uri, state, reason, in id order.

    Those that were deleted or replaced since are no failures; `state` may ask for them.
    """
    segments = read_segments(run)
    reader, dead = PlanReader(run, segments), find_dead(run, segments, read_deletions(run))
    commits = run.commits(ENCODE_IMAGES).committed()
    wanted = (state,) if state else _FAILURES
    for shard_id in _find_shards(run, segments, commits, dead, wanted):
        here = dead.of_range(*find_segment(segments, shard_id).ids_of_shard(shard_id))
        yield from _failures_of(run, reader, commits[shard_id], here, wanted)


def shards_with_failures(run: RunFolder, state: str | None = None) -> list[int]:
    """Encoded shards that hold images which could not be used, or are of one state."""
    segments, commits = read_segments(run), run.commits(ENCODE_IMAGES).committed()
    dead = find_dead(run, segments, read_deletions(run))
    return _find_shards(run, segments, commits, dead, (state,) if state else _FAILURES)


def _find_shards(
    run: RunFolder,
    segments: Sequence[Segment],
    commits: Mapping[int, Commit],
    dead: DeadImages,
    wanted: Collection[str],
) -> list[int]:
    """Encoded shards with an image in one of the `wanted` states."""
    adjusted = adjust_states(run, segments, commits, dead)
    states = {shard_id: adjusted.get(shard_id, commit.states) for shard_id, commit in commits.items()}
    return sorted(one for one, counts in states.items() if any(counts.get(state) for state in wanted))


def _failures_of(
    run: RunFolder, reader: PlanReader, commit: Commit, dead: DeadImages, wanted: Collection[str]
) -> Iterator[dict[str, Any]]:
    table = read_table(run.store, commit.files[VECTORS_STAGE], columns=["image_id", "state", "reason"])
    uris = {image.image_id: image.uri for image in reader.read_shard(commit.shard_id)}
    died = {image_id: state for state, ids in dead.by_state() for image_id in ids.tolist()}
    for row in table.to_pylist():
        state = died.get(row["image_id"], row["state"])
        if state in wanted:
            yield {**row, "state": state, "uri": uris[row["image_id"]]}


def _list_steps(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit], dead: DeadImages
) -> Iterator[Mapping[str, Any]]:
    """The steps whose shards can be counted by now, in order."""
    learned = run.models.latest() is not None
    yield from _list_learned(run) if learned else _list_learning(run)
    total = count_shards(segments)
    yield _summarise_step(ENCODE_IMAGES, encoded.values(), total)
    if not learned or len(encoded) < total:
        return
    numbers = number_index_shards(run, segments, encoded, run.purges.latest())
    built = run.commits(BUILD_INDEX).committed()
    yield _summarise_step(BUILD_INDEX, [built[one] for one in numbers if one in built], len(numbers))
    if augmented := run.commits(AUGMENT_INDEX).committed():
        yield _summarise_step(AUGMENT_INDEX, augmented.values(), len(augmented))
    draw = _name_draw(run, segments, numbers, dead)
    for kind in (PLANT_QUERIES, CERTIFY_INDEX):
        done = run.commits(f"{kind}-{draw}").committed()
        yield _summarise_step(f"{kind}-{draw}", done.values(), len(done))
    for label in sorted(label for label in run.logs() if label.startswith(_COMPRESSING)):
        done = run.commits(label).committed()
        yield _summarise_step(label, done.values(), len(done))


def _name_draw(run: RunFolder, segments: Sequence[Segment], numbers: Sequence[int], dead: DeadImages) -> str:
    """Of the queries that the current version was asked, or that the next one will be."""
    latest = run.versions.latest()
    if latest is not None and latest.build == name_shards(numbers):
        return latest.certificate.draw
    return draw_queries(run, segments, numbers, latest, dead.ids).name


def _list_learning(run: RunFolder) -> Iterator[Mapping[str, Any]]:
    # Only a run without models waits for the modules that learn: torch takes seconds and 200 MB.
    from ckn_scale.pipeline import list_training_steps

    for step in list_training_steps(run):
        yield _summarise_step(step.label, step.log.committed().values(), len(step.shard_ids()))


def _list_learned(run: RunFolder) -> Iterator[Mapping[str, Any]]:
    """What learning the models took, in the order it was begun; nothing where they were taken over."""
    labels = [label for label in run.logs() if not label.startswith(AFTER_LEARNING)]
    commits = {label: list(run.commits(label).committed().values()) for label in labels}
    for label in sorted(labels, key=lambda one: min((c.started_at for c in commits[one]), default=0)):
        yield _summarise_step(label, commits[label], len(commits[label]))


def _summarise_step(label: str, commits: Collection[Commit], total: int) -> Mapping[str, Any]:
    """Rate and remaining time are by the wall time between the first start and the last end."""
    done, images = len(commits), sum(sum(commit.states.values()) for commit in commits)
    first = min((commit.started_at for commit in commits), default=0.0)
    wall_s = max((commit.started_at + commit.seconds for commit in commits), default=0.0) - first
    return {
        "step": label,
        "done": done,
        "total": total,
        "seconds": round(sum(commit.seconds for commit in commits), 3),
        "bytes": sum(file.size_bytes for commit in commits for file in commit.files.values()),
        "redone": sum(commit.generation > 1 for commit in commits),
        "images_per_s": round(images / wall_s, 3) if wall_s > 0 else 0.0,
        "remaining_s": round(wall_s / done * (total - done), 1) if 0 < done < total else 0.0,
    }
