"""Groups of workers that answer calls together: what goes to them and comes back, and who is lost."""

from __future__ import annotations

import multiprocessing
import operator
import os

import numpy as np
import pytest

from ckn_scale.config import Resources
from ckn_scale.errors import InputError, RunFailed
from ckn_scale.runners.worker_groups import ProcessGroup


@pytest.fixture(scope="module")
def slices():
    """Each of two workers answers with a part of what both get."""
    with ProcessGroup(operator.getitem, Resources(workers=2)) as group:
        yield group


def test_arrays_of_any_size_come_back(slices):
    rng = np.random.default_rng(0)
    for size in (3, 0, 300_000, 5):
        values = rng.standard_normal(size)
        left, right = slices.call_all((values,), [slice(None, size // 2), slice(size // 2, None)])
        np.testing.assert_array_equal(np.concatenate([left, right]), values)
    assert slices.call_all(([1, "two"],), [1]) == ["two"]


def test_a_worker_that_is_gone_is_replaced(slices):
    slices.call_all((np.arange(4),), [0, 1])
    for process in multiprocessing.active_children():
        if process.name == "killable":
            process.kill()
    assert slices.call_all((np.arange(4),), [2, 3]) == [2, 3]


def fail(kind, part):
    if kind == "dies":
        os._exit(3)
    raise InputError(f"part {part} does not do")


def test_failures_of_the_function_are_told():
    with ProcessGroup(fail, Resources(workers=1, max_attempts=2)) as group:
        with pytest.raises(InputError, match="part 1 does not do"):
            group.call_all(("fails",), [1])
        with pytest.raises(RunFailed, match=r"2 workers were lost one after the other: .* code 3"):
            group.call_all(("dies",), [1])
