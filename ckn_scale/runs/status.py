"""How far a run is: shards done per step, images by state, failures. Reads records, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from ckn_scale.errors import CorruptData
from ckn_scale.steps.draw_queries import draw_queries
from ckn_scale.storage.builds import name_shards, number_index_shards
from ckn_scale.storage.plans import PlanReader, count_shards, read_segments
from ckn_scale.storage.run_folder import (
    BUILD_INDEX,
    CERTIFY_INDEX,
    ENCODE_IMAGES,
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


def summarise_run(run: RunFolder) -> dict[str, Any]:
    """The form that `ckn-scale status --json` prints; scripts rely on `steps` and `images`.

    With a damaged plan nobody knows how many shards there are: no steps then, and `damaged` says why.
    """
    damaged = [what for log in (run.models, run.versions) for what in log.read_all()[1].values()]
    encoded = run.commits(ENCODE_IMAGES).committed()
    try:
        segments = read_segments(run)
        steps = list(_list_steps(run, segments, encoded)) if segments else []
    except CorruptData as damage:
        segments, steps = run.plan.read_all()[0], []
        damaged.append(str(damage))
    states: Counter[str] = Counter()
    for commit in encoded.values():
        states.update(commit.states)
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
        "restores": None if latest is None else latest.restores,
        "certificate": None if latest is None else latest.certificate.to_body(),
        "damaged": damaged,
    }


def list_failures(run: RunFolder, state: str | None = None) -> Iterator[dict[str, Any]]:
    """Every image that could not be used: id, uri, state, reason, in id order."""
    reader = PlanReader(run, read_segments(run))
    commits = run.commits(ENCODE_IMAGES).committed()
    for shard_id in shards_with_failures(run, state):
        yield from _failures_of(run, reader, shard_id, commits[shard_id], state)


def shards_with_failures(run: RunFolder, state: str | None = None) -> list[int]:
    """Encoded shards that hold images which are not `ok`, or of one state."""
    return sorted(
        shard_id
        for shard_id, commit in run.commits(ENCODE_IMAGES).committed().items()
        if any(name != "ok" and state in (None, name) and count for name, count in commit.states.items())
    )


def _failures_of(
    run: RunFolder, reader: PlanReader, shard_id: int, commit: Commit, state: str | None
) -> Iterator[dict[str, Any]]:
    table = read_table(run.store, commit.files[VECTORS_STAGE], columns=["image_id", "state", "reason"])
    uris = {image.image_id: image.uri for image in reader.read_shard(shard_id)}
    for row in table.filter(pc.not_equal(table.column("state"), "ok")).to_pylist():
        if state in (None, row["state"]):
            yield {**row, "uri": uris[row["image_id"]]}


def _list_steps(
    run: RunFolder, segments: Sequence[Segment], encoded: Mapping[int, Commit]
) -> Iterator[Mapping[str, Any]]:
    """The steps whose shards can be counted by now, in order."""
    learned = run.models.latest() is not None
    yield from _list_learned(run) if learned else _list_learning(run)
    total = count_shards(segments)
    yield _summarise_step(ENCODE_IMAGES, encoded.values(), total)
    if not learned or len(encoded) < total:
        return
    numbers, built = number_index_shards(run, segments, encoded), run.commits(BUILD_INDEX).committed()
    yield _summarise_step(BUILD_INDEX, [built[one] for one in numbers if one in built], len(numbers))
    draw = _name_draw(run, segments, numbers)
    for kind in (PLANT_QUERIES, CERTIFY_INDEX):
        done = run.commits(f"{kind}-{draw}").committed()
        yield _summarise_step(f"{kind}-{draw}", done.values(), len(done))
    for label in sorted(label for label in run.logs() if label.startswith(_COMPRESSING)):
        done = run.commits(label).committed()
        yield _summarise_step(label, done.values(), len(done))


def _name_draw(run: RunFolder, segments: Sequence[Segment], numbers: Sequence[int]) -> str:
    """Of the queries that the current version was asked, or that the next one will be."""
    latest = run.versions.latest()
    if latest is not None and latest.build == name_shards(numbers):
        return latest.certificate.draw
    return draw_queries(run, segments, numbers, latest).name


def _list_learning(run: RunFolder) -> Iterator[Mapping[str, Any]]:
    # Only a run without models waits for the modules that learn: torch takes seconds and 200 MB.
    from ckn_scale.pipeline import list_training_steps

    for step in list_training_steps(run):
        yield _summarise_step(step.label, step.log.committed().values(), len(step.shard_ids()))


def _list_learned(run: RunFolder) -> Iterator[Mapping[str, Any]]:
    """What learning the models took, in the order it was begun; nothing where they were taken over."""
    labels = [
        label
        for label in run.logs()
        if not label.startswith((ENCODE_IMAGES, BUILD_INDEX, PLANT_QUERIES, CERTIFY_INDEX, *_COMPRESSING))
    ]
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
