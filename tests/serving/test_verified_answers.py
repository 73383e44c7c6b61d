"""Groups give evidence for what they own: the router's answer is that of an index in one process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic_index import publish_synthetic, random_units
from synthetic_points import make_candidates, make_query, serialise_candidates

from ckn_scale.core.copies import ScoredPairs
from ckn_scale.core.evidence import HEAD
from ckn_scale.search import hit_copies
from ckn_scale.search.engine import Index
from ckn_scale.search.evidence import Query
from ckn_scale.search.filters import Filter
from ckn_scale.search.shard import ShardGroup
from ckn_scale.serving.answers import SearchOptions
from ckn_scale.serving.forms import make_response
from ckn_scale.serving.hit_copies import verify_pairs
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import Encoded
from ckn_scale.serving.replicas import ShardReplica
from ckn_scale.serving.rounds import Rounds
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version

NUM_IMAGES, NUM_GROUPS = 260, 3  # more images than geometry looks at
SHARED = {7: 60, 40: 35, 90: 25}


class KnownQuery:
    """Stands in for the encoder: every image is this query."""

    def __init__(self, query):
        self.query = query

    async def encode(self, version, data, box):
        return Encoded(self.query.vector, self.query.points)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    sets, frames, _ = make_candidates(make_query(), [SHARED.get(one, 0) for one in range(NUM_IMAGES)], 50)
    return publish_synthetic(
        tmp_path_factory.mktemp("served") / "run",
        random_units(NUM_IMAGES, seed=3),
        5,
        make_points=lambda ids: serialise_candidates(ids, sets, frames, rows=ids),
    )


@pytest.fixture(scope="module")
def replicas(made):
    settings = ServeSettings(run_url=made.run.url, shard_groups=NUM_GROUPS)
    return [ShardReplica(settings, group) for group in range(NUM_GROUPS)]


@pytest.fixture(scope="module")
def index(made):
    return Index(made.version, SimpleNamespace(), ShardGroup(made.run.store, made.manifest))


def make_router(made, replicas, query):
    settings = ServeSettings(run_url=made.run.url, shard_groups=NUM_GROUPS)
    version = describe_version(made.run, made.version, NUM_GROUPS)
    return SearchRouter(settings, version, KnownQuery(query), replicas)


def ask(router, k=10, **options):
    return asyncio.run(router.search(b"", SearchOptions(k, **options)))


@pytest.mark.parametrize("seed", [0, 77], ids=["shown by three", "shown by none"])
@pytest.mark.parametrize("k", [1, 10, HEAD, HEAD + 30])
def test_the_routers_answer_is_that_of_one_process(made, replicas, index, seed, k):
    query = Query(made.vectors[11], make_query(seed=seed))
    answer, expected = ask(make_router(made, replicas, query), k), index.search_queries([query], k)[0]
    assert [hit.to_form() for hit in answer.hits] == [hit.to_form() for hit in expected]
    assert answer.found is expected.found is (seed == 0)
    assert (answer.coverage, answer.partial) == (1.0, False)
    assert answer.timings_ms.keys() - {"describe"} == {"encode", "search", "evidence"}
    body = make_response(answer, {}, "r").model_dump(exclude_unset=True)
    assert body["found"] is expected.found
    assert body["hits"] == [hit.to_form() for hit in expected]


def test_a_group_that_is_alone_answers_in_one_call(made, index):
    query = Query(made.vectors[11], make_query())
    settings = ServeSettings(run_url=made.run.url)
    group = ShardReplica(settings, 0)
    asked = []

    class Watched:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(group, name)

    router = SearchRouter(
        settings, describe_version(made.run, made.version, 1), KnownQuery(query), [Watched()]
    )
    for options in ({}, {"filter": "image_id in 7,40,100"}):
        wanted = Filter.parse(options["filter"]) if options else None
        answer = ask(router, wanted=wanted, offset=1, k=4)
        assert answer.hits == index.search_queries([query], 5, **options)[0][1:5]
        assert answer.timings_ms.keys() == {"encode", "search", "evidence"}
    assert asked == ["rank", "rank"]
    similar = asyncio.run(router.similar(7, SearchOptions(3)))
    assert [hit.image_id for hit in similar.hits] == [hit.image_id for hit in index.similar(7, 3)]
    with pytest.raises(ApiError, match="no such column"):
        ask(router, wanted=Filter.parse("year>2000"))


def test_without_verification_and_with_a_filter_it_is_the_same_too(made, replicas, index):
    query = Query(made.vectors[11], make_query())
    router, wanted = make_router(made, replicas, query), Filter.parse("image_id in 7,40,100")
    plain = ask(router, verify=False)
    assert plain.found is None
    assert plain.hits == index.search_queries([query], 10, verify=False)[0]
    filtered = ask(router, wanted=wanted)
    assert filtered.hits == index.search_queries([query], 10, filter=wanted)[0]
    assert [hit.image_id for hit in filtered.hits] == [7, 40, 100]
    for verify in (False, True):
        with pytest.raises(ApiError, match="no such column"):
            ask(router, verify=verify, wanted=Filter.parse("year>2000"))


class DyingReplica:
    """A group that answers until it is asked for this."""

    def __init__(self, replica, dies_at):
        self._replica, self._dies_at = replica, dies_at

    def __getattr__(self, name):
        if name == self._dies_at:
            return self._die
        return getattr(self._replica, name)

    async def _die(self, *arguments):
        raise RuntimeError("the replica died")


@pytest.mark.parametrize(
    ("dies_at", "k"),
    [("find", 10), ("score", 10), ("verify_best", 10), ("verify", HEAD + 1), ("describe", HEAD + 1)],
)
def test_a_group_that_dies_on_the_way_leaves_a_partial_answer(made, replicas, dies_at, k):
    query = Query(made.vectors[11], make_query())
    version = describe_version(made.run, made.version, NUM_GROUPS)
    group = version.group_of(7)
    mixed = [DyingReplica(one, dies_at) if place == group else one for place, one in enumerate(replicas)]
    answer = ask(make_router(made, mixed, query), k)
    assert answer.partial
    assert len(answer.hits) == k or k > 10, "others take the places of what it owned"
    assert answer.coverage == pytest.approx(1 - version.group_rows[group] / NUM_IMAGES)
    assert all(version.group_of(hit.image_id) != group for hit in answer.hits)
    assert answer.found, "what the others hold is still found"


def test_an_index_without_points_is_not_verified(tmp_path):
    made = publish_synthetic(tmp_path / "run", random_units(20), 2)
    replica = ShardReplica(ServeSettings(run_url=made.run.url), 0)
    settings, version = ServeSettings(run_url=made.run.url), describe_version(made.run, made.version, 1)
    query = Query(made.vectors[3], None)
    router = SearchRouter(settings, version, KnownQuery(query), [replica])
    answer = ask(router)
    assert answer.found is None
    assert answer.hits[0].image_id == 3
    assert np.isclose(answer.hits[0].score, 1, atol=1e-5)
    with pytest.raises(ApiError, match="no points"):
        ask(router, verify=True)


def publish_copies(folder, has_points):
    """40 and 90 are 7 once more, in other groups; 41 is something else."""
    sets, frames, _ = make_candidates(make_query(), [SHARED.get(one, 0) for one in range(NUM_IMAGES)], 50)
    vectors, source = random_units(NUM_IMAGES, seed=3), np.arange(NUM_IMAGES)
    for one in (40, 90):
        vectors[one], source[one] = vectors[7] + 0.01 * vectors[one], 7
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def make_points(ids):
        return serialise_candidates(ids, sets, frames, rows=source[ids]) if has_points else None

    made = publish_synthetic(folder / "run", vectors, 5, make_points=make_points)
    settings = ServeSettings(run_url=made.run.url, shard_groups=NUM_GROUPS)
    replicas = [ShardReplica(settings, group) for group in range(NUM_GROUPS)]
    return made, make_router(made, replicas, Query(made.vectors[7], make_query() if has_points else None))


@pytest.mark.parametrize("has_points", [True, False])
def test_copies_among_the_hits_are_grouped_under_the_best(tmp_path, has_points):
    _, router = publish_copies(tmp_path, has_points)
    plain, grouped = ask(router, k=NUM_IMAGES), ask(router, k=NUM_IMAGES, group_copies=True)
    best, *others = [hit.image_id for hit in plain.hits if hit.image_id in (7, 40, 90)]
    assert grouped.copies == {best: others}
    assert grouped.hits == [hit for hit in plain.hits if hit.image_id not in others]
    pages = [ask(router, k=5, offset=at, group_copies=True).hits for at in (0, 5)]
    assert pages[0] + pages[1] == grouped.hits[:10]
    body = make_response(grouped, {}, "r").model_dump(exclude_unset=True)
    assert [hit["copies"] for hit in body["hits"][:2]] == [others, []]
    assert ask(router, group_copies=True, wanted=Filter.parse("image_id in 500")).hits == []


@pytest.mark.parametrize("has_points", [True, False])
def test_an_index_in_one_process_groups_the_same_copies(tmp_path, has_points):
    made, router = publish_copies(tmp_path, has_points)
    index = Index(made.version, SimpleNamespace(points=None), ShardGroup(made.run.store, made.manifest))
    query = Query(made.vectors[7], make_query() if has_points else None)
    served = ask(router, k=130, group_copies=True)
    (answer,) = index.search_queries([query], 130, group_copies=True)
    assert list(answer) == served.hits
    assert {one: list(ids) for one, ids in answer.copies.items()} == served.copies
    (short,) = index.search_queries([query], 2, group_copies=True)
    assert (list(short), short.copies) == (served.hits[:2], answer.copies)
    similar = index.similar(7, 3, group_copies=True)
    assert [len(ids) for ids in similar.copies.values()] == [1]  # 40 and 90 under the better one
    assert index.search_queries([query], 2)[0].copies == {}


def test_what_only_looks_like_a_copy_does_not_pass_geometry(tmp_path):
    made, router = publish_copies(tmp_path, has_points=True)
    rounds = Rounds(router.ask_group, describe_version(made.run, made.version, NUM_GROUPS))
    alike = ScoredPairs(np.array([7, 7, 8, 40]), np.array([40, 41, 9, 90]), np.array([0.5, 0.5, 0.9995, 0.5]))
    agree = [True, False, True, True]
    assert asyncio.run(verify_pairs(rounds, alike)).tolist() == agree
    assert hit_copies.verify_pairs(ShardGroup(made.run.store, made.manifest), alike).tolist() == agree
