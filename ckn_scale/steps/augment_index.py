"""Augment: each row of an index shard joined with its nearest neighbours (setting `index.augment`).

A task writes the index of one shard once more; the manifest names that file instead of the built one, and all
that is made later (certificate, short codes) is made of it. Neighbours are the living rows of the shard's own
segment of the plan and of those before it. So an append augments the shards that it adds and leaves the
others as they are, and a task is named by the files that it compares: when one of them is another, after a
retry or a purge, it is done anew. An image that is deleted later stays in the sums of others until a purge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ckn_scale.core.neighbour_sums import OpenPart, Part, augment_index
from ckn_scale.core.topk import RowMask
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vector_index import KINDS
from ckn_scale.search.cache import FileCache
from ckn_scale.search.shard import map_index
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.build_index import BuildIndex, list_index_shards
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.builds import count_neighbouring_shards, number_rows
from ckn_scale.storage.deletions import find_dead, read_deletions
from ckn_scale.storage.index_files import IndexManifest, IndexShard
from ckn_scale.storage.run_folder import (
    AUGMENT_INDEX,
    BUILD_INDEX,
    VECTORS_STAGE,
    RunFolder,
    index_shard_path,
    parse_data_path,
)
from ckn_scale.storage.stored_files import read_table, write_file


@dataclass(frozen=True, eq=False)
class AugmentIndex(Step):
    """One task for an index shard of a build."""

    build: str  # as `name_build` gives it

    name = AUGMENT_INDEX
    sections = BuildIndex.sections

    @cached_property
    def built(self) -> BuildIndex:
        return BuildIndex(self.run, self.build)

    @cached_property
    def tasks(self) -> Mapping[int, tuple[IndexShard, list[IndexShard]]]:
        """By number: a shard that has rows, and those that hold its neighbours."""
        shards = list_index_shards(self.built)
        reach = count_neighbouring_shards(self.run, self.built.plan.segments, self.built.purge)
        held = {shard.shard: [one for one in shards[: reach[shard.shard]] if one.rows] for shard in shards}
        return {
            _number(shard, held[shard.shard]): (shard, held[shard.shard]) for shard in shards if shard.rows
        }

    @cached_property
    def dim(self) -> int:
        encoded = self.run.commits(EncodeImages.name).committed()[0]
        vectors = read_table(self.run.store, encoded.files[VECTORS_STAGE], columns=["image_id"])
        return int(vectors.schema.metadata[b"dim"])

    @cached_property
    def dead(self) -> np.ndarray:
        """Ids that are nobody's neighbours."""
        return find_dead(self.run, self.built.plan.segments, read_deletions(self.run)).ids

    def shard_ids(self) -> Sequence[int]:
        return list(self.tasks)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        shard, others = self.tasks[shard_id]
        parts: list[OpenPart] = [partial(self._open, one) for one in others]
        codec = make_codec(self.settings.reduction.stored, self.dim)
        augmented = augment_index(self._open(shard).index, parts, self.settings.index.augment, codec)
        folder = self.run.index_folder(number_built(shard), attempt)
        path = index_shard_path(folder, shard.shard, "faiss")
        file = write_file(self.run.store, path, augmented.to_bytes(), augmented.rows)
        return ShardResult(files={"index": file}, report={"shard": shard.shard, "neighbours_in": len(others)})

    def _open(self, shard: IndexShard) -> Part:
        path = FileCache().fetch(self.run.store, shard.index)
        index = map_index(path, KINDS[self.settings.reduction.stored], self.dim)
        living = np.isin(index.ids, shard.ids_within(self.dead), assume_unique=True, invert=True)
        return Part(index, None if living.all() else RowMask(living))


def list_augmented_shards(step: AugmentIndex) -> list[IndexShard]:
    """The index shards of a build whose tasks are all committed, with their rows augmented."""
    commits = step.log.committed()
    files = {shard.shard: commits[number].files["index"] for number, (shard, _) in step.tasks.items()}
    shards = list_index_shards(step.built)
    return [replace(shard, index=files.get(shard.shard, shard.index)) for shard in shards]


def restore_built(run: RunFolder, manifest: IndexManifest) -> IndexManifest:
    """A manifest with the rows as they were built: of images by themselves."""
    if not run.settings["index"].get("augment"):
        return manifest
    built = run.commits(BUILD_INDEX).committed()
    files = {shard.shard: built[number_built(shard)].files["index"] for shard in manifest.shards}
    return replace(
        manifest, shards=tuple(replace(shard, index=files[shard.shard]) for shard in manifest.shards)
    )


def number_searched(built: BuildIndex, shards: Sequence[IndexShard]) -> Sequence[int]:
    """Numbers of a build's index shards by what a search finds in them.

    With `index.augment` a purge or retry changes rows of shards that are built as before.
    """
    if built.settings.index.augment:
        return [number_rows(shard.shard, shard.index) for shard in shards]
    return built.shard_ids()


def number_built(shard: IndexShard) -> int:
    """The number that `build_index` has a shard by: its files are filed under it."""
    named = parse_data_path(shard.index.path)
    assert named is not None
    return named[1]


def _number(shard: IndexShard, others: Sequence[IndexShard]) -> int:
    """The number of a task, by its content."""
    content = " ".join(one.index.sha256 for one in (shard, *others))
    return int(hashlib.sha256(content.encode()).hexdigest()[:15], 16)
