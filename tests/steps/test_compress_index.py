from __future__ import annotations

import numpy as np
import pytest

from ckn_scale.steps.compress_index import choose_shortlist
from ckn_scale.steps.learn_quantiser import choose_kind, count_lists
from ckn_scale.storage.index_files import IndexManifest


def manifest(rows: int, dim: int = 32768, kind: str = "signs") -> IndexManifest:
    return IndexManifest("b", dim, rows, {}, (), kind)


@pytest.mark.parametrize(
    ("wanted", "rows", "dim", "kind", "chosen"),
    [
        ("auto", 20, 32768, "signs", None),
        ("auto", 1_500, 32768, "signs", None),
        ("auto", 30_000, 32768, "signs", None),
        ("auto", 100_000, 32768, "signs", "pq"),
        ("auto", 100_000, 256, "signs", None),  # 40 bytes a row are soon compared
        ("auto", 100_000, 1024, "exact", "pq"),
        ("auto", 20_000_000, 32768, "signs", "ivf-pq"),
        ("signs", 20_000_000, 32768, "signs", None),
        ("pq", 20, 32768, "signs", "pq"),
        ("ivf-pq", 20, 32768, "signs", "ivf-pq"),
        ("pq", 0, 32768, "signs", None),
    ],
)
def test_the_kind_is_chosen_by_rows_and_their_bytes(wanted, rows, dim, kind, chosen):
    assert choose_kind(wanted, manifest(rows, dim, kind)) == chosen


def test_lists_grow_with_the_rows_in_few_steps():
    assert count_lists("pq", 10**9) == 0
    assert [count_lists("ivf-pq", rows) for rows in (20, 10**6, 2 * 10**7, 3 * 10**7, 10**9)] == [
        4, 256, 1024, 1024, 1024,
    ]  # fmt: skip


def test_the_shortest_list_that_keeps_enough_is_chosen_on_half_and_judged_by_the_other():
    before = np.zeros(400)
    before[::2][:10] = 4_000  # 5 % of the tuned half need 5,000
    before[1::2][:1] = 7_000
    choice = choose_shortlist(before, np.zeros(400, int), 0)
    assert (choice.depth, choice.probes) == (5_000, 1)
    assert (choice.tuned_kept, choice.tuned_on, choice.kept, choice.queries) == (200, 200, 199, 200)
    assert choice.is_good
    assert choose_shortlist(np.full(9, 10**6), np.zeros(9, int), 0).kept == 0
    assert not choose_shortlist(np.full(9, 10**6), np.zeros(9, int), 0).is_good


def test_lists_are_looked_at_as_far_as_the_originals_lie():
    ranks = np.arange(400) % 40
    choice = choose_shortlist(np.zeros(400), ranks, 256)
    assert (choice.probes, choice.kept) == (64, 200)
    assert choose_shortlist(np.zeros(400), np.full(400, 255), 256).probes == 256


@pytest.mark.parametrize("queries", [0, 1, 2])
def test_few_queries_choose_too(queries):
    choice = choose_shortlist(np.zeros(queries), np.zeros(queries, int), 16)
    assert choice.is_good
    assert choice.probes == (16 if queries == 0 else 1)
