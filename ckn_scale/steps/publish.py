"""Publish: a certified build becomes the current version, by one numbered record."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckn_scale.errors import DataDamaged, WorkFailed
from ckn_scale.steps.build_index import BuildIndex, list_index_shards
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan import require_segments
from ckn_scale.storage.index_files import StoredFile, read_manifest
from ckn_scale.storage.records import RecordLog, new_attempt
from ckn_scale.storage.run_folder import RunFolder

log = logging.getLogger(__name__)


def publish_version(
    run: RunFolder,
    build: str,
    manifest: StoredFile,
    certificate: Mapping[str, Any],
    *,
    accept: bool = False,
) -> int:
    """The number of the version that now is current. `accept` publishes below the target, on record."""
    states = count_states(run)
    if not certificate["passed"] and not accept:
        raise WorkFailed(_explain_refusal(certificate))
    body = {
        "attempt": new_attempt(),
        "build": build,
        "manifest": manifest.path,
        "manifest_sha256": manifest.sha256,
        "certificate": {**certificate, "accepted": bool(accept and not certificate["passed"])},
        "states": states,
    }
    number = _append_once(run.versions, body)
    log.info("version %d is build %s", number, build)
    return number


def _append_once(versions: RecordLog, body: Mapping[str, Any]) -> int:
    """The next version; or the latest, if another driver has just published the same manifest."""
    while True:
        latest = versions.latest()
        if latest is not None and latest[1]["manifest_sha256"] == body["manifest_sha256"]:
            return latest[0]
        number = max(versions.numbers(), default=0) + 1
        with contextlib.suppress(DataDamaged):  # a damaged record keeps its number
            if versions.create(number, dict(body)).won:
                return number


def find_published(built: BuildIndex) -> int | None:
    """The current version, if it is this build and names the index files that stand."""
    latest = built.run.versions.latest()
    if latest is None or latest[1]["build"] != built.params["build"]:
        return None
    try:
        manifest = read_manifest(built.run.store, latest[1]["manifest"], latest[1]["manifest_sha256"])
    except DataDamaged:
        return None
    return latest[0] if list(manifest.shards) == list_index_shards(built) else None


def count_states(run: RunFolder) -> dict[str, int]:
    """Images by state; WorkFailed unless every planned image is in exactly one."""
    planned = sum(segment.num_images for segment in require_segments(run))
    states: Counter[str] = Counter()
    for commit in run.commits(EncodeImages.name).committed().values():
        states.update(commit.states)
    if sum(states.values()) != planned:
        raise WorkFailed(f"{run.url}: {planned} images planned, {sum(states.values())} have a state")
    return dict(sorted(states.items()))


def _explain_refusal(certificate: Mapping[str, Any]) -> str:
    if certificate["queries"] == 0:
        return "not published: no planted query could be asked; `--accept` publishes all the same"
    return (
        f"not published: {certificate['first']} of {certificate['queries']} planted queries came back first; "
        f"with confidence {certificate['confidence']:g} that is at least {certificate['lower']:.3f}, "
        f"below publish.target = {certificate['target']:g}. More keypoints or words raise it, more "
        "publish.num_queries narrow the interval, `--accept` publishes all the same, on record"
    )
