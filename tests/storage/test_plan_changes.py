"""A source beside the plan, by hand."""

from __future__ import annotations

import pytest

from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.plan_changes import ChangeCounts, SourceComparison
from ckn_scale.storage.plans import PlannedImage
from ckn_scale.storage.run_records import PlanSource, Segment
from ckn_scale.storage.stored_files import StoredFile

FILE = StoredFile("a", "b", 0)
PLANNED = [("a", 0, "1"), ("b", 1, "1"), ("b", 5, "2"), ("c", 2, "1"), ("d", 6, "1"), ("e", 3, "1")]
OWN = Segment(1, 0, 6, 0, 4, (FILE,), FILE, FILE, PlanSource(("x",), 1, "c", ""), (), {})


def compare(refs, **options):
    compared = SourceComparison(**options)
    planned = [PlannedImage(image_id, uri, 10, etag) for uri, image_id, etag in PLANNED]
    fresh = compared.select_new((ImageRef(uri, 10, etag) for uri, etag in refs), planned)
    return [ref.uri for ref in fresh], compared


def test_new_and_changed_images_are_selected_and_the_newest_of_a_uri_counts():
    fresh, compared = compare([("0", "1"), ("a", "1"), ("b", "2"), ("c", "9"), ("f", "1")])
    assert (fresh, compared.replaced, compared.gone) == (["0", "c", "f"], [2], [])
    assert compared.counts == ChangeCounts(added=2, replaced=1, unchanged=2)


def test_an_older_content_that_is_back_replaces_the_newer_one():
    assert compare([("b", "1")])[1].replaced == [5]


@pytest.mark.parametrize(
    ("listed", "gone"),
    [([], [0, 5, 2, 3]), (["b", "e"], [0, 2]), (["a", "b", "c", "d", "e", "z"], [])],
)
def test_what_is_missing_of_the_own_segments_is_gone(listed, gone):
    _, compared = compare([(uri, "2" if uri == "b" else "1") for uri in listed], own=[OWN])
    assert (compared.gone, compared.own_living) == (gone, 4), "6 is of another source"


def test_what_was_deleted_by_hand_stays_out_until_it_changes():
    fresh, compared = compare([("a", "1"), ("c", "9")], by_user={0, 2}, own=[OWN])
    assert (fresh, compared.replaced, compared.kept_out) == (["c"], [], 1)
    assert compared.gone == [5, 3]
    assert compared.own_living == 2


def test_what_was_gone_and_is_back_is_new():
    fresh, compared = compare([("a", "1")], by_sync={0})
    assert (fresh, compared.counts.added, compared.replaced) == (["a"], 1, [])
