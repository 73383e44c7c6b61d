from __future__ import annotations

import builtins
import re

import faiss
import numpy as np
import pytest

from ckn_scale.core import topk, vector_index
from ckn_scale.core.faiss_library import import_faiss
from ckn_scale.core.topk import NO_ID, as_row_mask, find_topk, merge_topk
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import SignIndex, VectorIndex, build_exact, build_signs
from ckn_scale.errors import MissingDependency


def unit_rows(count: int, dim: int = 24, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_search_gives_inner_products_worked_out_by_hand():
    vectors = np.array([[1, 0], [0.6, 0.8], [0, 1]], dtype=np.float32)
    index = build_exact(vectors, np.array([10, 20, 30]))
    similarity, ids = index.search(np.array([[0, 1]], dtype=np.float32), 2)
    assert ids.tolist() == [[30, 20]]
    np.testing.assert_allclose(similarity, [[1, 0.8]], rtol=1e-6)
    assert (similarity.dtype, ids.dtype) == (np.float32, np.int64)
    assert (index.rows, index.dim) == (3, 2)


def test_search_agrees_with_a_full_comparison():
    vectors, queries = unit_rows(500), unit_rows(5, seed=1)
    similarity, ids = build_exact(vectors, np.arange(500) * 3).search(queries, 7)
    expected = queries.astype(np.float64) @ vectors.astype(np.float64).T
    order = np.argsort(-expected, axis=1)[:, :7]
    np.testing.assert_array_equal(ids, order * 3)
    np.testing.assert_allclose(similarity, np.take_along_axis(expected, order, axis=1), atol=1e-6)


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_sharded_search_equals_unsharded_bit_for_bit_with_duplicates(num_shards):
    # Every image four times: ties at every place, the k-th included.
    vectors = np.repeat(unit_rows(60), 4, axis=0)[np.random.default_rng(2).permutation(240)]
    assert_parts_answer_like_the_whole(vectors, unit_rows(6, seed=3), 10, num_shards)


@pytest.mark.parametrize("k", [1, 10, 100])
def test_ties_across_shards_go_by_id_however_many_they_are(k):
    # Copies fill the shortlist of every shard; near copies, one bit away, must not hide behind them.
    vectors = unit_rows(900)
    vectors[50:800] = vectors[50]
    vectors[100:800:7, 0] = np.nextafter(vectors[50, 0], np.float32(2))
    queries = np.concatenate([vectors[50:51], vectors[100:101], -vectors[50:51], unit_rows(3, seed=6)])
    whole = assert_parts_answer_like_the_whole(vectors, queries, k, 3)
    expected = score_all(vectors, queries)
    for row, scores in enumerate(expected):
        assert whole[1][row].tolist() == np.lexsort((np.arange(900), -scores))[:k].tolist()


def score_all(vectors: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Every pair, one by one."""
    doubles = vectors.astype(np.float64)
    return np.array([[np.float32((row * query).sum()) for row in doubles] for query in queries.astype(float)])


def assert_parts_answer_like_the_whole(vectors, queries, k, num_shards):
    rows = np.arange(len(vectors))
    whole = build_exact(vectors, rows).search(queries, k)
    chunks = np.array_split(rows, num_shards)
    parts = [build_exact(vectors[chunk], chunk).search(queries, k) for chunk in chunks]
    merged = merge_topk([p[0] for p in parts], [p[1] for p in parts], k, larger_is_better=True)
    np.testing.assert_array_equal(merged[1], whole[1])
    np.testing.assert_array_equal(merged[0], whole[0])
    return whole


def test_equal_rows_cost_one_more_pass_and_a_bounded_block(monkeypatch):
    vectors = np.tile(unit_rows(1), (5000, 1))
    index = build_exact(vectors, np.arange(5000))
    passes, blocks = [], []
    for name, calls in (("nearest", passes), ("above", passes), ("vectors_at", blocks)):
        monkeypatch.setattr(index, name, recording(getattr(index, name), calls))
    monkeypatch.setattr(topk, "SCORED_BYTES", 8 * 24 * 1000)
    assert index.search(vectors[:1], 5)[1].tolist() == [[0, 1, 2, 3, 4]]
    assert len(passes) == 2
    assert max(len(positions) for (positions,) in blocks) == 1000


def recording(call, calls):
    def record(*arguments):
        calls.append(arguments)
        return call(*arguments)

    return record


def test_search_does_not_depend_on_the_other_queries_or_threads():
    # 40 queries together go through BLAS, one alone does not.
    index, queries = build_exact(unit_rows(300, dim=1000), np.arange(300)), unit_rows(40, dim=1000, seed=4)
    together = index.search(queries, 4, threads=2)
    for row, query in enumerate(queries):
        alone = index.search(query[None], 4)
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


@pytest.mark.parametrize("dim", [64, 1000])
def test_a_batch_is_one_matrix_product_and_a_single_query_is_not(dim):
    index, queries = build_exact(unit_rows(300, dim), np.arange(300)), unit_rows(4, dim, seed=4)
    together = index.nearest(queries, 300)[0]
    faiss.cvar.distance_compute_blas_threshold = 10**9
    row_by_row = index._vectors.search(queries, 300)[0]
    alone = np.concatenate([index.nearest(query[None], 300)[0] for query in queries])
    np.testing.assert_array_equal(alone, row_by_row)
    assert (together != alone).any(), "FAISS went row by row: BLAS rounds otherwise"
    assert np.abs(together - alone).max() < index.error_bound(queries).min()


def test_search_leaves_the_threads_of_the_process_alone():
    index = build_exact(unit_rows(3), np.arange(3))
    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(3)
        index.search(unit_rows(1), 1, threads=2)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


@pytest.mark.parametrize("k", [3, 10**9, 10**18])
def test_k_is_cut_to_the_rows(k):
    similarity, ids = build_exact(unit_rows(2), np.array([4, 9])).search(unit_rows(1), k)
    assert sorted(ids[0].tolist()) == [4, 9]
    assert similarity.shape == ids.shape == (1, 2)


def test_a_query_of_zeros_is_as_like_to_everything():
    similarity, ids = build_exact(unit_rows(400), np.arange(400)).search(np.zeros((1, 24), np.float32), 3)
    assert (ids.tolist(), similarity.tolist()) == ([[0, 1, 2]], [[0, 0, 0]])


def test_an_empty_index_and_no_queries_give_nothing():
    empty = build_exact(np.empty((0, 8), np.float32), np.empty(0, np.int64))
    assert empty.search(np.zeros((1, 8), np.float32), 2)[1].shape == (1, 0)
    assert build_exact(unit_rows(3), np.arange(3)).search(np.empty((0, 24), np.float32), 2)[0].shape == (0, 2)


def test_bytes_are_a_faiss_index_and_equal_for_equal_input():
    vectors = unit_rows(20).astype(np.float16)
    data = build_exact(vectors, np.arange(20)).to_bytes()
    assert data == build_exact(vectors, np.arange(20)).to_bytes()
    again = VectorIndex(faiss.deserialize_index(np.frombuffer(data, dtype=np.uint8)))
    np.testing.assert_array_equal(again.ids, np.arange(20))
    assert again.search(vectors[7:8], 1)[1].tolist() == [[7]]


@pytest.mark.parametrize(
    ("vectors", "ids", "message"),
    [
        (unit_rows(2), [1], "2 vectors need as many ids"),
        (unit_rows(2), [5, 5], "ids must ascend, got 5 before 5"),
        (unit_rows(2), [-1, 5], "ids must be ≥ 0, got -1"),
        (unit_rows(2)[0], [1], "vectors must be (N, D)"),
        (np.full((1, 4), np.nan), [1], "finite"),
        (np.full((1, 4), 2.0), [1], "unit length, got one of length 4"),
    ],
)
def test_build_exact_refuses_bad_input(vectors, ids, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_exact(vectors, np.array(ids))


def test_search_refuses_bad_queries():
    index = build_exact(unit_rows(3), np.arange(3))
    with pytest.raises(ValueError, match=r"\(N, 24\), got \(1, 5\)"):
        index.search(np.zeros((1, 5), np.float32), 1)
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        index.search(unit_rows(1), 0)


def test_other_faiss_indexes_are_refused():
    with pytest.raises(ValueError, match="IndexIDMap, got IndexFlatIP"):
        VectorIndex(faiss.IndexFlatIP(4))
    with pytest.raises(ValueError, match="inner product"):
        VectorIndex(faiss.IndexIDMap(faiss.IndexFlatL2(4)))


def test_a_missing_faiss_is_one_sentence(monkeypatch):
    def refuse(name, *args, **kwargs):
        if name == "faiss":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=r"pip install 'ckn-scale\[cpu\]'"):
        import_faiss()


def row(*values):
    return np.array([values], dtype=np.float32)


def ids(*values):
    return np.array([values], dtype=np.int64)


def test_merge_topk_takes_the_best_of_all_lists():
    values, found = merge_topk(
        [row(0.9, 0.1), row(0.5, 0.4)], [ids(7, 3), ids(1, 2)], 3, larger_is_better=True
    )
    assert found.tolist() == [[7, 1, 2]]
    assert values.tolist() == [[np.float32(0.9), np.float32(0.5), np.float32(0.4)]]
    assert values.dtype == np.float32
    assert found.dtype == np.int64


def test_merge_topk_follows_the_stated_direction():
    lists = [row(0.9, 0.1), row(0.5, 0.4)], [ids(7, 3), ids(1, 2)]
    assert merge_topk(*lists, 2, larger_is_better=False)[1].tolist() == [[3, 2]]


def test_merge_topk_breaks_ties_by_id():
    lists = [row(0.5, 0.5), row(0.5, 0.5)], [ids(9, 4), ids(2, 30)]
    for larger in (True, False):
        assert merge_topk(*lists, 3, larger_is_better=larger)[1].tolist() == [[2, 4, 9]]


def test_merge_topk_does_not_depend_on_the_order_of_the_lists():
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 5, (4, 6)).astype(np.float32) for _ in range(3)]
    found = [rng.permutation(100)[:24].reshape(4, 6) + 100 * part for part in range(3)]
    once = merge_topk(values, found, 5, larger_is_better=True)
    again = merge_topk(values[::-1], found[::-1], 5, larger_is_better=True)
    np.testing.assert_array_equal(once[0], again[0])
    np.testing.assert_array_equal(once[1], again[1])


def test_merge_topk_puts_missing_entries_last():
    values, found = merge_topk([row(99.0, 0.3)], [ids(NO_ID, 5)], 3, larger_is_better=True)
    assert found.tolist() == [[5, NO_ID]]
    assert values.tolist() == [[np.float32(0.3), -np.inf]]


def test_merge_topk_cuts_k_to_what_there_is():
    values, found = merge_topk([row(0.3), row(0.4, 0.2)], [ids(5), ids(6, 7)], 10**12, larger_is_better=True)
    assert found.tolist() == [[6, 5, 7]]
    assert values.shape == (1, 3)


def test_merge_topk_keeps_a_real_entry_before_a_filler_of_the_same_value():
    found = merge_topk([row(-np.inf, -np.inf)], [ids(NO_ID, 8)], 1, larger_is_better=True)[1]
    assert found.tolist() == [[8]]


def test_merge_topk_of_no_queries_is_empty():
    empty = np.empty((0, 3), dtype=np.float32)
    values, found = merge_topk([empty], [empty.astype(np.int64)], 2, larger_is_better=True)
    assert values.shape == found.shape == (0, 2)


@pytest.mark.parametrize(
    ("values", "found", "k", "message"),
    [
        ([row(1)], [ids(1)], 0, "k must be ≥ 1, got 0"),
        ([], [], 1, "got 0 and 0"),
        ([row(1)], [ids(1), ids(2)], 1, "got 1 and 2"),
        ([row(1, 2)], [ids(1)], 1, "(1, 2)"),
        ([row(np.nan)], [ids(1)], 1, "NaN"),
    ],
)
def test_merge_topk_refuses_bad_input(values, found, k, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        merge_topk(values, found, k, larger_is_better=True)


DIM = 512
CODEC = SignCodec(DIM)


def sign_rows(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def build_rows(rows, ids=None):
    return build_signs(CODEC.encode(rows), np.arange(len(rows)) if ids is None else ids, DIM)


def test_search_agrees_with_the_decoded_vectors():
    rows, queries = sign_rows(300), sign_rows(6, seed=1) + 0.7 * sign_rows(300)[:6]
    index = build_rows(rows, np.arange(300) * 3)
    similarity, ids = index.search(queries, 8)
    expected = queries @ CODEC.decode(CODEC.encode(rows)).T
    np.testing.assert_allclose(similarity, np.take_along_axis(expected, ids // 3, axis=1), atol=3e-3)
    assert ids[:, 0].tolist() == [0, 3, 6, 9, 12, 15]
    assert (index.rows, index.dim) == (300, DIM)
    np.testing.assert_array_equal(index.vector(5), CODEC.decode(CODEC.encode(rows[5:6]))[0])


@pytest.mark.parametrize("num_shards", [2, 7])
def test_sharded_search_of_signs_equals_unsharded_bit_for_bit_with_duplicates(num_shards):
    rows = np.repeat(sign_rows(60), 4, axis=0)[np.random.default_rng(2).permutation(240)]
    queries = sign_rows(6, seed=3)
    whole = build_rows(rows).search(queries, 10)
    parts = [
        build_rows(rows[chunk], chunk).search(queries, 10)
        for chunk in np.array_split(np.arange(240), num_shards)
    ]
    merged = merge_topk([p[0] for p in parts], [p[1] for p in parts], 10, larger_is_better=True)
    np.testing.assert_array_equal(merged[1], whole[1])
    np.testing.assert_array_equal(merged[0], whole[0])


def test_search_breaks_ties_by_id_however_many_there_are():
    rows = np.tile(sign_rows(1), (300, 1))
    assert build_rows(rows).search(rows[:1], 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_search_of_signs_does_not_depend_on_the_other_queries_or_threads():
    index, queries = build_rows(sign_rows(200)), sign_rows(40, seed=4)
    together = index.search(queries, 4, threads=2)
    for row, query in enumerate(queries):
        alone = index.search(query[None], 4)
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


def test_k_is_cut_to_the_rows_and_nothing_gives_nothing():
    assert build_rows(sign_rows(2), np.array([4, 9])).search(sign_rows(1), 10**9)[1].shape == (1, 2)
    assert build_rows(sign_rows(0)).search(sign_rows(1), 3)[1].shape == (1, 0)
    assert build_rows(sign_rows(2)).search(sign_rows(0), 3)[0].shape == (0, 2)
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        build_rows(sign_rows(2)).search(sign_rows(1), 0)


def test_a_mapped_file_answers_the_same_and_equal_input_gives_equal_bytes(tmp_path):
    rows = sign_rows(30)
    data = build_rows(rows).to_bytes()
    assert data == build_rows(rows).to_bytes()
    (tmp_path / "shard.faiss").write_bytes(data)
    mapped = SignIndex(faiss.read_index(str(tmp_path / "shard.faiss"), faiss.IO_FLAG_MMAP_IFC), DIM)
    np.testing.assert_array_equal(mapped.search(rows[:3], 4)[0], build_rows(rows).search(rows[:3], 4)[0])
    np.testing.assert_array_equal(mapped.ids, np.arange(30))


def test_bad_input_is_refused():
    codes = CODEC.encode(sign_rows(2))
    with pytest.raises(ValueError, match=re.escape("1 ids need codes (1, 72), got (2, 72)")):
        build_signs(codes, np.array([1]), DIM)
    with pytest.raises(ValueError, match="ids must ascend, got 5 before 5"):
        build_signs(codes, np.array([5, 5]), DIM)
    with pytest.raises(ValueError, match="expected an IndexRaBitQ of 512 numbers, got IndexFlatIP of 4"):
        SignIndex(faiss.IndexIDMap(faiss.IndexFlatIP(4)), DIM)


def make_exact(vectors: np.ndarray, ids: np.ndarray) -> VectorIndex:
    return build_exact(vectors, ids)


def make_signs(vectors: np.ndarray, ids: np.ndarray) -> SignIndex:
    return build_signs(SignCodec(vectors.shape[1]).encode(vectors), ids, vectors.shape[1])


@pytest.mark.parametrize("make", [make_exact, make_signs])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.7, 0.99, 1.0])
def test_a_masked_search_is_the_search_of_the_allowed_rows_alone(make, share):
    rng = np.random.default_rng(8)
    vectors, ids = np.repeat(unit_rows(500), 3, axis=0)[rng.permutation(1500)], np.arange(1500) * 2
    allowed = rng.random(1500) < share
    queries = np.concatenate([vectors[:3], unit_rows(5, seed=9)])
    expected = make(vectors[allowed], ids[allowed]).search(queries, 40)
    for asked, block in ((queries, slice(None)), (queries[:1], slice(0, 1))):
        found = make(vectors, ids).search(asked, 40, allowed=allowed)
        np.testing.assert_array_equal(found[1], expected[1][block])
        np.testing.assert_array_equal(found[0], expected[0][block])


def test_few_rows_to_leave_out_of_a_batch_keep_the_matrix_product(monkeypatch):
    vectors, queries = unit_rows(300, 64), unit_rows(4, 64, seed=4)
    index, allowed = build_exact(vectors, np.arange(300)), np.ones(300, bool)
    allowed[index.search(queries, 5)[1].ravel()] = False
    expected = index.search(queries, 7, allowed=allowed)
    monkeypatch.setattr(vector_index, "MOST_DROPPED", 0)
    for one, other in zip(index.search(queries, 7, allowed=allowed), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert allowed[expected[1]].all()


@pytest.mark.parametrize("make", [make_exact, make_signs])
def test_a_mask_that_is_none_of_these_rows_is_refused(make):
    index = make(unit_rows(5), np.arange(5))
    with pytest.raises(ValueError, match="a mask for 5 rows, got one of 4"):
        index.search(unit_rows(1), 1, allowed=np.ones(4, bool))
    with pytest.raises(ValueError, match=r"must be \(rows,\) bool, got int64 \(5,\)"):
        index.search(unit_rows(1), 1, allowed=np.ones(5, np.int64))


@pytest.mark.parametrize("make", [make_exact, make_signs])
@pytest.mark.parametrize("cuts", [[], [500], [1, 1, 30, 1490], list(range(0, 1500, 100))])
@pytest.mark.parametrize("k", [1, 40, 10**6])
def test_joined_indexes_answer_like_one_with_masks_copies_and_empty_parts(make, cuts, k):
    rng = np.random.default_rng(8)
    vectors = np.repeat(unit_rows(500), 3, axis=0)[rng.permutation(1500)]
    vectors[200:900:2] = vectors[200]  # more copies than any shortlist holds, in several parts
    allowed = rng.random(1500) < 0.8
    allowed[30:300] = False
    queries = np.concatenate([vectors[200:201], unit_rows(4, seed=9)])
    whole = make(vectors, np.arange(1500))
    parts = [make(vectors[rows], rows) for rows in np.array_split(np.arange(1500), cuts)]
    late = np.arange(1500) >= 1200  # where there are few parts, only the last has rows
    for mask in (np.ones(1500, bool), allowed, late):
        masks = [as_row_mask(mask[part.ids], part.rows) for part in parts]
        expected = whole.search(queries, k, allowed=mask)
        for asked in (slice(0, 5), slice(0, 1)):
            found = find_topk(list(zip(parts, masks, strict=True)), whole.prepare(queries[asked]), k)
            np.testing.assert_array_equal(found[1], expected[1][asked])
            np.testing.assert_array_equal(found[0], expected[0][asked])


@pytest.mark.parametrize("make", [make_exact, make_signs])
def test_copies_in_many_small_indexes_come_by_id(make):
    vectors = unit_rows(400)
    copies = np.sort(np.random.default_rng(1).choice(400, 150, replace=False))
    vectors[copies] = vectors[copies[0]]
    parts = [(make(vectors[two], two), None) for two in np.split(np.arange(400), 200)]
    prepared = parts[0][0].prepare(vectors[copies[:1]])
    for k in (5, 10, 40):
        assert find_topk(parts, prepared, k)[1].tolist() == [copies[:k].tolist()]


def test_joined_indexes_score_the_head_of_all_and_not_of_each(monkeypatch):
    vectors, scored = unit_rows(400), []
    parts = [build_exact(vectors[rows], rows) for rows in np.array_split(np.arange(400), 8)]
    for part in parts:
        monkeypatch.setattr(part, "vectors_at", recording(part.vectors_at, scored))
    find_topk([(part, None) for part in parts], unit_rows(1, seed=2), 10)
    assert sum(len(positions) for (positions,) in scored) == 26
