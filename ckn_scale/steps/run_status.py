"""How a run stands: shards done per step, images by state, failures. Reads records, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow.compute as pc

from ckn_scale.config import parse_settings
from ckn_scale.errors import DataDamaged
from ckn_scale.steps.base import Step
from ckn_scale.steps.build_index import BuildIndex, name_build
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.pipeline import list_learning
from ckn_scale.steps.plan import PlanReader, read_segments, read_whole_segments
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit, read_table


def summarise_run(run: RunFolder) -> dict[str, Any]:
    """The form that `ckn-scale status --json` prints; scripts rely on `steps` and `images`.

    With a damaged plan nobody knows how many shards there are: no steps then, and `damaged` says why.
    """
    damaged = [what for log in (run.models, run.versions) for what in log.find_damaged().values()]
    try:
        segments = read_segments(run)
        steps = [_summarise_step(step) for step in _known_steps(run)] if segments else []
    except DataDamaged as damage:
        segments, steps = read_whole_segments(run), []
        damaged.append(str(damage))
    encoded = run.commits(EncodeImages.name).committed() if segments else {}
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
        "version": None if latest is None else latest[0],
        "certificate": None if latest is None else latest[1]["certificate"],
        "damaged": damaged,
    }


def list_failures(run: RunFolder, state: str | None = None) -> Iterator[dict[str, Any]]:
    """Every image that could not be used: id, uri, state, reason, in id order."""
    reader = PlanReader(run, read_segments(run))
    commits = run.commits(EncodeImages.name).committed()
    for shard_id in shards_with_failures(run, state):
        yield from _failures_of(run, reader, shard_id, commits[shard_id], state)


def shards_with_failures(run: RunFolder, state: str | None = None) -> list[int]:
    """Encoded shards that hold images which are not `ok`, or of one state."""
    return sorted(
        shard_id
        for shard_id, commit in run.commits(EncodeImages.name).committed().items()
        if any(name != "ok" and state in (None, name) and count for name, count in commit.states.items())
    )


def _failures_of(
    run: RunFolder, reader: PlanReader, shard_id: int, commit: Commit, state: str | None
) -> Iterator[dict[str, Any]]:
    table = read_table(run.store, commit.files["vectors"], columns=["image_id", "state", "reason"])
    uris = {image.image_id: image.uri for image in reader.read_shard(shard_id)}
    for row in table.filter(pc.not_equal(table.column("state"), "ok")).to_pylist():
        if state in (None, row["state"]):
            yield {**row, "uri": uris[row["image_id"]]}


def _known_steps(run: RunFolder) -> Iterator[Step]:
    """The steps whose shards can be counted by now."""
    for kind, params in list_learning(parse_settings(run.settings)):
        yield kind(run, params)
    yield EncodeImages(run)
    if run.models.latest() is None:
        return
    encode = EncodeImages(run)
    if len(encode.log.committed()) == len(encode.shard_ids()):
        params = {"build": name_build(run, encode.plan.segments, encode.log.committed())}
        yield BuildIndex(run, params)
        yield CertifyIndex(run, params)


def _summarise_step(step: Step) -> Mapping[str, Any]:
    commits = step.log.committed()
    return {
        "step": step.label,
        "done": len(commits),
        "total": len(step.shard_ids()),
        "seconds": round(sum(commit.seconds for commit in commits.values()), 3),
        "bytes": sum(file.size_bytes for commit in commits.values() for file in commit.files.values()),
        "redone": sum(commit.generation > 1 for commit in commits.values()),
        "images_per_s": _rate(commits.values()),
        "remaining_s": _remaining_s(commits.values(), len(step.shard_ids())),
    }


def _wall_s(commits: Collection[Commit]) -> float:
    if not commits:
        return 0.0
    ends = max(commit.started_at + commit.seconds for commit in commits)
    return ends - min(commit.started_at for commit in commits)


def _rate(commits: Collection[Commit]) -> float:
    """Images per second of wall time between the first start and the last end."""
    images, wall_s = sum(sum(commit.states.values()) for commit in commits), _wall_s(commits)
    return round(images / wall_s, 3) if wall_s > 0 else 0.0


def _remaining_s(commits: Collection[Commit], total: int) -> float:
    done = len(commits)
    return round(_wall_s(commits) / done * (total - done), 1) if 0 < done < total else 0.0
