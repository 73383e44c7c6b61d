import re

import faiss
import numpy as np
import pytest

from ckn_scale.core.sign_index import SignIndex, build_signs
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import merge_topk

DIM = 512
CODEC = SignCodec(DIM)


def unit_rows(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def build(rows, ids=None):
    return build_signs(CODEC.encode(rows), np.arange(len(rows)) if ids is None else ids, DIM)


def test_search_agrees_with_the_decoded_vectors():
    rows, queries = unit_rows(300), unit_rows(6, seed=1) + 0.7 * unit_rows(300)[:6]
    index = build(rows, np.arange(300) * 3)
    similarity, ids = index.search(queries, 8)
    expected = queries @ CODEC.decode(CODEC.encode(rows)).T
    np.testing.assert_allclose(similarity, np.take_along_axis(expected, ids // 3, axis=1), atol=3e-3)
    assert ids[:, 0].tolist() == [0, 3, 6, 9, 12, 15]
    assert (index.rows, index.dim) == (300, DIM)
    np.testing.assert_array_equal(index.vector(5), CODEC.decode(CODEC.encode(rows[5:6]))[0])


@pytest.mark.parametrize("num_shards", [2, 7])
def test_sharded_search_equals_unsharded_bit_for_bit_with_duplicates(num_shards):
    rows = np.repeat(unit_rows(60), 4, axis=0)[np.random.default_rng(2).permutation(240)]
    queries = unit_rows(6, seed=3)
    whole = build(rows).search(queries, 10)
    parts = [
        build(rows[chunk], chunk).search(queries, 10) for chunk in np.array_split(np.arange(240), num_shards)
    ]
    merged = merge_topk([p[0] for p in parts], [p[1] for p in parts], 10, larger_is_better=True)
    np.testing.assert_array_equal(merged[1], whole[1])
    np.testing.assert_array_equal(merged[0], whole[0])


def test_search_breaks_ties_by_id_however_many_there_are():
    rows = np.tile(unit_rows(1), (300, 1))
    assert build(rows).search(rows[:1], 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_search_does_not_depend_on_the_other_queries_or_threads():
    index, queries = build(unit_rows(200)), unit_rows(40, seed=4)
    together = index.search(queries, 4, threads=2)
    for row, query in enumerate(queries):
        alone = index.search(query[None], 4)
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


def test_k_is_cut_to_the_rows_and_nothing_gives_nothing():
    assert build(unit_rows(2), np.array([4, 9])).search(unit_rows(1), 10**9)[1].shape == (1, 2)
    assert build(unit_rows(0)).search(unit_rows(1), 3)[1].shape == (1, 0)
    assert build(unit_rows(2)).search(unit_rows(0), 3)[0].shape == (0, 2)
    with pytest.raises(ValueError, match="k must be ≥ 1, got 0"):
        build(unit_rows(2)).search(unit_rows(1), 0)


def test_a_mapped_file_answers_the_same_and_equal_input_gives_equal_bytes(tmp_path):
    rows = unit_rows(30)
    data = build(rows).to_bytes()
    assert data == build(rows).to_bytes()
    (tmp_path / "shard.faiss").write_bytes(data)
    mapped = SignIndex(faiss.read_index(str(tmp_path / "shard.faiss"), faiss.IO_FLAG_MMAP_IFC), DIM)
    np.testing.assert_array_equal(mapped.search(rows[:3], 4)[0], build(rows).search(rows[:3], 4)[0])
    np.testing.assert_array_equal(mapped.ids, np.arange(30))


def test_bad_input_is_refused():
    codes = CODEC.encode(unit_rows(2))
    with pytest.raises(ValueError, match=re.escape("1 ids need codes (1, 72), got (2, 72)")):
        build_signs(codes, np.array([1]), DIM)
    with pytest.raises(ValueError, match="ids must ascend, got 5 before 5"):
        build_signs(codes, np.array([5, 5]), DIM)
    with pytest.raises(ValueError, match="expected an IndexRaBitQ of 512 numbers, got IndexFlatIP of 4"):
        SignIndex(faiss.IndexIDMap(faiss.IndexFlatIP(4)), DIM)
