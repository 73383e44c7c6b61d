"""Bodies of records are those that earlier releases wrote and read."""

from __future__ import annotations

import pytest

from ckn_scale.storage.run_records import Certificate, Failures, Version
from ckn_scale.storage.stored_files import StoredFile

FILE = {"path": "index/b-ab/manifest.json", "sha256": "0" * 64, "size_bytes": 10, "rows": 21}
CERTIFICATE = {
    "queries": 16,
    "asked": 16,
    "new_asked": 16,
    "taken_over": 0,
    "in_sample": 4,
    "first": 15,
    "behind_copies": 1,
    "first_share": 0.9375,
    "index_shards": 6,
    "asked_shards": 6,
    "rows": 21,
    "asked_rows": 21,
    "fewest_rows": 21,
    "everywhere": 16,
    "everywhere_first": 15,
    "lower": 0.78,
    "confidence": 0.95,
    "target": 0.7,
    "passed": True,
    "accepted": False,
    "by_view": {"crop": 1.0},
    "draw": "0123456789abcdef",
    "encoder": "cd",
    "outcomes": FILE,
    "evidence": {
        "pairs": {"0": 90, "3": 10},
        "other_pairs": {"1": 100},
        "strengths": {"-30": 100},
        "thresholds": {"1e-03": 6, "1e-04": 8, "1e-06": 11},
        "slope": 1.5,
        "middle": -5.0,
        "real": 0,
        "false_alarms": 0,
        "planted": 8,
        "matched": 7,
        "words": 4096,
    },
    "shortlist": {},
    "carried_from": None,
}
BODY = {
    "build": "b",
    "manifest": FILE,
    "rows": 21,
    "segments": 1,
    "generation": 1,
    "states": {"ok": 21, "truncated": 1},
    "failures": {
        "new_images": 22,
        "new_failed": {"truncated": 1},
        "held_images": 10,
        "lost": 1,
        "share": 0.1,
        "limit": 0.1,
    },
    "certificate": CERTIFICATE,
    "deletions": 0,
    "purge": 0,
}


def test_a_version_reads_back_as_it_was_written():
    version = Version.from_body(7, BODY)
    assert version.certificate.outcomes == StoredFile(**FILE)
    assert version.failures == Failures(22, {"truncated": 1}, 10, 1, limit=0.1)
    assert version.to_body() == BODY


def test_a_rollback_names_what_it_restores():
    body = {**BODY, "restores": 3}
    assert Version.from_body(7, BODY).restores is None
    assert Version.from_body(7, body).restores == 3
    assert Version.from_body(7, body).to_body() == body


@pytest.mark.parametrize("body", [{}, {"queries": 16, "first": 15, "of another release": 1}])
def test_a_certificate_of_another_release_is_read_as_far_as_it_is_known(body):
    certificate = Certificate.from_body(body)
    assert (certificate.queries, certificate.first) == (body.get("queries", 0), body.get("first", 0))
    assert certificate.everywhere == certificate.queries
    assert certificate.outcomes is None
