from __future__ import annotations

import pytest

from ckn_scale.steps.certify_index import wilson_lower


def test_wilson_lower_has_the_known_values():
    # 95 % one-sided, z = 1.6449: n = 100, p = 0.9 → (0.9 + 0.01353 − 1.6449·√(0.0009 + 6.76e-5)) / 1.02706
    assert wilson_lower(90, 100, 0.95) == pytest.approx(0.8396, abs=5e-4)
    assert wilson_lower(0, 0, 0.95) == 0.0
    assert wilson_lower(0, 50, 0.95) == pytest.approx(0.0, abs=1e-9)


def test_wilson_lower_rises_with_evidence_and_stays_below_the_share():
    assert wilson_lower(9, 10, 0.95) < wilson_lower(90, 100, 0.95) < wilson_lower(900, 1000, 0.95) < 0.9
    assert wilson_lower(10, 10, 0.95) < 1.0
