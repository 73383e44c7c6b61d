"""The kit that starts Ray nodes for tests says why when it cannot."""

from __future__ import annotations

import pytest
from ray_nodes import RayNodes


def test_nodes_that_do_not_start_show_what_their_keeper_said(user_env):
    with (
        pytest.raises(RuntimeError, match=r"its keeper said:\n[\s\S]*Resource quantities"),
        RayNodes(user_env, 1, num_cpus=-1),
    ):
        pass
