"""Compress: short codes of a build's rows, so that a query looks at all of these and compares few rows.

make_codes → measure_shortlist → a manifest that names the codes. How long the
shortlist is, and how many lists a query looks at, is measured: planted queries say where their originals
stand by code. Half of the queries choose, the other half says what the choice keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ckn_scale.core.plain_index import read_blocks
from ckn_scale.core.short_codes import CodeScan, Quantiser
from ckn_scale.search.cache import FileCache
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.shortlist import QUANTISER, load_quantiser, open_codes, predict_memory
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.augment_index import number_built, number_searched
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.certify_index import CertifyIndex, PlantedQuery
from ckn_scale.steps.learn_quantiser import LearnQuantiser
from ckn_scale.storage.builds import position_of
from ckn_scale.storage.index_files import (
    IndexManifest,
    ShortCodes,
    read_manifest,
    write_manifest,
    write_short_codes,
)
from ckn_scale.storage.models import load_model
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import (
    LEARN_QUANTISER,
    MAKE_CODES,
    MEASURE_SHORTLIST,
    index_shard_path,
)
from ckn_scale.storage.stored_files import StoredFile

log = logging.getLogger(__name__)

DEPTHS = (2_000, 5_000, 10_000, 20_000)
PROBED_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
KEPT_IN_LISTS = 0.995
KEPT = 0.99  # of the queries that a comparison of all rows answers


@dataclass(frozen=True, eq=False)
class MakeCodes(Step):
    """The short codes of each index shard; those of shards that an append left as they were are there."""

    manifest_file: StoredFile
    quantiser_file: StoredFile
    quantiser_name: str  # the beginning of its sha256

    name = MAKE_CODES
    sections = LearnQuantiser.sections
    label_fields = ("quantiser_name",)

    @cached_property
    def manifest(self) -> IndexManifest:
        return read_manifest(self.run.store, self.manifest_file)

    @cached_property
    def quantiser(self) -> Quantiser:
        return Quantiser.from_part(load_model(self.run.store, QUANTISER, self.quantiser_file))

    def shard_ids(self) -> Sequence[int]:
        return number_searched(BuildIndex(self.run, self.manifest.build), self.manifest.shards)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        position, device = position_of(shard_id), self.settings.numerics.device
        codes = [np.empty((0, self.quantiser.code_bytes), np.uint8)]
        lists = [np.empty(0, np.int32)]
        for shard in ShardGroup(self.run.store, self.manifest, [position]).shards:
            for _, vectors in read_blocks(shard.index):
                codes.append(self.quantiser.encode(vectors, device))
                lists.append(self.quantiser.assign(vectors))
        built = next(number_built(shard) for shard in self.manifest.shards if shard.shard == position)
        path = index_shard_path(self.run.index_folder(built, attempt), position, "codes")
        file = write_short_codes(self.run.store, path, np.concatenate(codes), np.concatenate(lists))
        return ShardResult(files={"codes": file})


@dataclass(frozen=True, eq=False)
class MeasureShortlist(Step):
    """Where the originals of planted queries stand by code, in each index shard that is asked."""

    manifest_file: StoredFile  # that names the codes
    draw_name: str
    quantiser_name: str

    name = MEASURE_SHORTLIST
    sections = CertifyIndex.sections
    label_fields = ("draw_name", "quantiser_name")

    @cached_property
    def certified(self) -> CertifyIndex:
        return CertifyIndex(self.run, self.manifest_file, self.draw_name)

    @cached_property
    def queries(self) -> list[tuple[PlantedQuery, np.ndarray]]:
        """Those that a comparison of all rows can answer, and their vectors."""
        return [(one, one.vector) for one in self.certified.asked if one.vector is not None]

    @cached_property
    def quantiser(self) -> Quantiser:
        manifest = self.certified.planted.manifest
        assert manifest.short_codes is not None
        return load_quantiser(self.run.store, manifest, manifest.short_codes)

    @cached_property
    def levels(self) -> np.ndarray:
        """(Q,) the score by code of each query's original."""
        originals = np.array([query.original for query, _ in self.queries])
        scan = CodeScan(
            self.quantiser, [self.quantiser.encode(originals)], [np.zeros(len(originals), np.int32)], 1
        )
        levels = np.empty(len(originals), np.float32)
        for place, (_, vector) in enumerate(self.queries):
            scores, positions = scan.score(vector[None], len(originals), everywhere=True)
            levels[place] = scores[0][positions[0] == place][0]
        return levels

    def shard_ids(self) -> Sequence[int]:
        return self.certified.shard_ids()

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        manifest, position = self.certified.planted.manifest, position_of(shard_id)
        held = [shard for shard in manifest.shards if shard.shard == position and shard.rows]
        if not held or not self.queries or manifest.short_codes is None:
            return ShardResult(report={"before": []})
        scan = open_codes(self.run.store, manifest, manifest.short_codes, held, FileCache())
        vectors = np.array([vector for _, vector in self.queries])
        depth = min(DEPTHS[-1], scan.rows)
        before = [
            int(np.count_nonzero(scan.score(vector[None], depth, everywhere=True)[0] > level))
            for vector, level in zip(vectors, self.levels, strict=True)
        ]
        return ShardResult(report={"before": before})

    def choose(self) -> Choice:
        """The shortlist that the queries confirm."""
        return choose_shortlist(self.count_before(), self.rank_lists(), self.quantiser.num_lists)

    def count_before(self) -> np.ndarray:
        """(Q,) how many rows of all index shards that were asked stand before the original."""
        commits = self.log.committed()
        counts = [commits[number].report["before"] for number in self.shard_ids()]
        total = np.sum([each for each in counts if each] or [[0] * len(self.queries)], axis=0)
        manifest, asked = self.certified.planted.manifest, {position_of(one) for one in self.shard_ids()}
        rows = sum(shard.rows for shard in manifest.shards)
        asked_rows = sum(shard.rows for shard in manifest.shards if shard.shard in asked)
        scaled: np.ndarray = total * rows / max(1, asked_rows)  # as if the others were like these
        return scaled

    def rank_lists(self) -> np.ndarray:
        """(Q,) where the list of the original stands among the lists that are nearest to the query."""
        if not self.quantiser.num_lists:
            return np.zeros(len(self.queries), np.int64)
        if not self.queries:
            return np.zeros(0, np.int64)
        owners = self.quantiser.assign(np.array([query.original for query, _ in self.queries]))
        vectors = np.array([vector for _, vector in self.queries])
        ranked = self.quantiser.rank_lists(vectors, self.quantiser.num_lists)
        places = [int(np.flatnonzero(one == own)[0]) for one, own in zip(ranked, owners, strict=True)]
        return np.array(places, np.int64)


@dataclass(frozen=True)
class Choice:
    """How a shortlist is made, and what half of the queries say that it keeps."""

    depth: int
    probes: int
    kept: int  # of `queries`, which had no part in the choice
    queries: int
    tuned_kept: int
    tuned_on: int

    @property
    def is_good(self) -> bool:
        return self.kept >= KEPT * self.queries

    def explain(self, kind: str, *, used: bool) -> str:
        outcome = "used all the same, as index.kind asks" if used else "not used: all rows are compared"
        return (
            f"short codes ({kind}) keep {self.kept} of {self.queries} planted queries on a shortlist of "
            f"{self.depth}, below {KEPT:g}; they are {outcome}"
        )


def choose_shortlist(before: np.ndarray, list_ranks: np.ndarray, lists: int) -> Choice:
    """The shortest one that keeps enough of every other query, judged by those between."""
    tuned = np.arange(len(before)) % 2 == 0
    judged = ~tuned if len(before) > 1 else tuned
    shares = [max(1, round(share * lists)) for share in PROBED_SHARES] if lists else [1]
    enough = (probes for probes in shares if np.mean(list_ranks[tuned] < probes) >= KEPT_IN_LISTS)
    probes = next(enough, shares[-1]) if len(before) else shares[-1]
    near = list_ranks < probes
    deep = (one for one in DEPTHS if np.mean(near[tuned] & (before[tuned] < one)) >= KEPT)
    depth = next(deep, DEPTHS[-1]) if len(before) else DEPTHS[0]
    kept = near & (before < depth)
    return Choice(
        depth, probes, int(kept[judged].sum()), int(judged.sum()), int(kept[tuned].sum()), int(tuned.sum())
    )


def describe_choice(step: MeasureShortlist, choice: Choice, kind: str, *, used: bool) -> dict[str, Any]:
    """For the certificate: what was chosen, what it keeps, and what it cost."""
    made = step.run.commits(LEARN_QUANTISER).committed().values()
    rows = step.certified.planted.manifest.rows
    quantiser = step.quantiser
    return {
        "kind": kind,
        "used": used,
        "depth": choice.depth,
        "lists": quantiser.num_lists,
        "probes": choice.probes,
        "kept": choice.kept,
        "queries": choice.queries,
        "tuned_kept": choice.tuned_kept,
        "tuned_on": choice.tuned_on,
        "target": KEPT,
        "bytes_per_row": quantiser.code_bytes + 4,
        "memory_bytes": predict_memory(rows, quantiser.code_bytes, quantiser.num_lists),
        "learned_from": max((commit.report["vectors"] for commit in made), default=0),
    }


def write_coded_manifest(made: MakeCodes, kind: str, choice: Choice | None = None) -> StoredFile:
    """The manifest of the same shards with their codes; before a choice, with all lists."""
    run, commits, plain = made.run, made.log.committed(), made.manifest
    codes = {position_of(number): commits[number].files["codes"] for number in made.shard_ids()}
    depth, probes = (choice.depth, choice.probes) if choice else (DEPTHS[0], made.quantiser.num_lists or 1)
    manifest = replace(
        plain,
        shards=tuple(replace(shard, codes=codes[shard.shard]) for shard in plain.shards),
        short_codes=ShortCodes(kind, made.quantiser_file, depth, probes),
    )
    return write_manifest(run.store, run.index_folder(plain.build, new_attempt()), manifest)
