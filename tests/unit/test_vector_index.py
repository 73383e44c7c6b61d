from __future__ import annotations

import builtins
import re

import faiss
import numpy as np
import pytest

from ckn_scale.core.topk import NO_ID, merge_topk
from ckn_scale.core.vector_index import VectorIndex, build_exact, import_faiss
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
    queries = unit_rows(6, seed=3)
    whole = build_exact(vectors, np.arange(240)).search(queries, 10)
    parts = [
        build_exact(vectors[chunk], chunk).search(queries, 10)
        for chunk in np.array_split(np.arange(240), num_shards)
    ]
    merged = merge_topk([p[0] for p in parts], [p[1] for p in parts], 10, larger_is_better=True)
    np.testing.assert_array_equal(merged[1], whole[1])
    np.testing.assert_array_equal(merged[0], whole[0])


def test_search_breaks_ties_by_id_beyond_the_first_shortlist():
    vectors = np.tile(unit_rows(1), (300, 1))
    assert build_exact(vectors, np.arange(300)).search(vectors[:1], 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_search_does_not_depend_on_the_other_queries_or_threads():
    index, queries = build_exact(unit_rows(300), np.arange(300)), unit_rows(40, seed=4)
    together = index.search(queries, 4, threads=2)
    for row, query in enumerate(queries):
        alone = index.search(query[None], 4)
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


def test_search_fills_places_beyond_the_rows():
    similarity, ids = build_exact(unit_rows(2), np.array([4, 9])).search(unit_rows(1), 3)
    assert sorted(ids[0, :2].tolist()) == [4, 9]
    assert ids[0, 2] == NO_ID
    assert similarity[0, 2] == -np.inf


def test_an_empty_index_and_no_queries_give_nothing():
    empty = build_exact(np.empty((0, 8), np.float32), np.empty(0, np.int64))
    assert empty.search(np.zeros((1, 8), np.float32), 2)[1].tolist() == [[NO_ID, NO_ID]]
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
