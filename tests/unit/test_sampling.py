import numpy as np
import pytest

from ckn_scale.core.sampling import hash_priorities, smallest

# A change here changes every sample ever drawn.
GOLDEN = ["0xe220a8397b1dcdaf", "0xd300120a5ea35cac", "0xd4993d56a5f40fb6"]


def test_hash_priorities_are_the_same_on_every_machine():
    values = hash_priorities(0, np.arange(3))
    assert values.dtype == np.uint64
    assert [hex(value) for value in values] == GOLDEN


def test_hash_priorities_look_uniform():
    values = hash_priorities(1, np.arange(100_000)) / 2.0**64
    assert abs(values.mean() - 0.5) < 0.01
    assert np.histogram(values, bins=10, range=(0, 1))[0].min() > 9_500


def test_hash_priorities_depend_on_seed_and_every_key():
    rows = np.arange(50)
    base = hash_priorities(0, rows, rows)
    assert not np.any(base == hash_priorities(1, rows, rows))
    assert not np.any(base == hash_priorities(0, rows, rows + 1))
    assert not np.any(base[1:] == hash_priorities(0, rows + 1, rows)[:-1])


def test_hash_priorities_broadcast_keys():
    grid = hash_priorities(3, np.arange(4)[:, None], np.arange(5)[None])
    assert grid.shape == (4, 5)
    assert grid[2, 3] == hash_priorities(3, np.array([2]), np.array([3]))[0]


def test_hash_priorities_accept_negative_and_empty_keys():
    assert hash_priorities(-5, np.array([-1, 7])).shape == (2,)
    assert hash_priorities(0, np.empty(0, np.int64)).shape == (0,)


def test_hash_priorities_refuse_floats_and_nothing():
    with pytest.raises(TypeError, match="float64"):
        hash_priorities(0, np.array([0.5]))
    with pytest.raises(ValueError, match="at least one"):
        hash_priorities(0)


def test_smallest_orders_by_priority_then_index():
    assert smallest(np.array([5, 1, 5, 0, 1], np.uint64), 4).tolist() == [3, 1, 4, 0]


@pytest.mark.parametrize("k", [0, 1, 10, 100, 999, 1000, 2000])
def test_smallest_equals_a_full_sort(k):
    priorities = np.random.default_rng(0).integers(0, 300, 1000).astype(np.uint64)
    expected = sorted(range(1000), key=lambda index: (priorities[index], index))[:k]
    assert smallest(priorities, k).tolist() == expected


def test_smallest_of_a_union_is_the_smallest_of_the_parts():
    priorities = hash_priorities(0, np.arange(1000))
    parts = [part[smallest(priorities[part], 20)] for part in np.array_split(np.arange(1000), 7)]
    union = np.concatenate(parts)
    assert set(union[smallest(priorities[union], 20)]) == set(smallest(priorities, 20))


def test_smallest_refuses_negative_counts():
    with pytest.raises(ValueError, match="-1"):
        smallest(np.zeros(3, np.uint64), -1)


def test_smallest_of_floats_breaks_ties_by_index() -> None:
    values = np.array([1, 3, 2, 3, 2, 2], np.float32)
    assert smallest(-values, 3).tolist() == [1, 3, 2]
    assert smallest(-values, 100).tolist() == [1, 3, 2, 4, 5, 0]
    assert smallest(-values, 6).tolist() == [1, 3, 2, 4, 5, 0]
    assert smallest(np.empty(0, np.float32), 3).tolist() == []
