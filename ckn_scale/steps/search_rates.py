"""Train: SGD's learning-rate candidates, each tried by whoever is free. No shards for the closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckn_scale.core.ckn_sgd import (
    PairProblem,
    candidate_rates,
    choose_rate,
    draw_filters,
    pose_problem,
    try_rate,
)
from ckn_scale.core.ckn_training import choose_alpha
from ckn_scale.steps.base import ShardResult, Step, WorkerSettings
from ckn_scale.steps.channels import TRAINING_SECTIONS
from ckn_scale.steps.draw_subpatches import DrawSubpatches, read_subpatches


class SearchRates(Step):
    """One shard per channel and candidate. `params`: layer, counted from 0."""

    name = "search_rates"
    sections = TRAINING_SECTIONS
    label_params = ("layer",)

    @property
    def drawn(self) -> DrawSubpatches:
        return DrawSubpatches(self.run, self.params)

    def shards_of(self, position: int) -> Sequence[int]:
        training = self.settings.training
        count = training.sgd_rate_candidates if training.solver == "sgd" else 0
        return range(position * count, (position + 1) * count)

    def shard_ids(self) -> Sequence[int]:
        return [shard_id for position in self.drawn.positions() for shard_id in self.shards_of(position)]

    def pose(self, position: int) -> tuple[PairProblem, torch.Tensor]:
        """What a channel's layer has to learn, and the filters that every candidate begins with."""
        spec, training = self.settings.channels[position].ckn, self.settings.training
        rows = read_subpatches(self.drawn, spec.channel)
        alpha = choose_alpha(rows, spec.alpha_quantile)
        problem = pose_problem(torch.from_numpy(rows).to(self.settings.numerics.device), alpha, training)
        num_filters = spec.layers[int(self.params["layer"])].num_filters
        return problem, draw_filters(problem, num_filters, training.seed)

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        training = self.settings.training
        position, candidate = divmod(shard_id, training.sgd_rate_candidates)
        problem, start = self.pose(position)
        rate = candidate_rates(training)[candidate]
        error = try_rate(problem, start, rate, training)
        return ShardResult(report={"rate": rate, "error": error if math.isfinite(error) else None})


def read_rate(step: SearchRates, position: int) -> float | None:
    """The best candidate of a channel; None where nothing is searched."""
    shard_ids = step.shards_of(position)
    if not shard_ids:
        return None
    commits = step.log.committed()
    reports = [commits[shard_id].report for shard_id in shard_ids]
    errors = [math.inf if report["error"] is None else report["error"] for report in reports]
    return choose_rate([report["rate"] for report in reports], errors)
