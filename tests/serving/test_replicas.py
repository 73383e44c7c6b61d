"""A query that takes too long is ended with its process, and those beside it go on."""

from __future__ import annotations

import asyncio
import os

import pytest
from hostile_images import slow_image
from running_server import query_view
from synthetic_index import publish_synthetic, random_units

from ckn_scale.search.engine import open_index
from ckn_scale.search.versions import latest_version_number
from ckn_scale.serving.app import local_resources
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import Encoded, Rejected
from ckn_scale.serving.replicas import EncoderReplica, ShardReplica
from ckn_scale.serving.router import SearchRouter
from ckn_scale.serving.settings import ServeSettings
from ckn_scale.serving.versions import describe_version
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture
def replica(photo_run):
    replica = EncoderReplica(ServeSettings(run_url=str(photo_run), query_timeout_s=2.0))
    yield replica
    replica.close()


@pytest.fixture
def version(photo_run):
    return latest_version_number(RunFolder.open(str(photo_run)))


def test_a_query_past_its_time_is_ended_and_others_go_on_meanwhile(replica, version):
    async def ask() -> None:
        good, slow = query_view("coffee"), slow_image()
        assert isinstance(await replica.encode(version, good, None), Encoded)
        hostile = asyncio.ensure_future(replica.encode(version, slow, None))
        for _ in range(2):
            assert isinstance(await replica.encode(version, good, None), Encoded)
        rejected = await hostile
        assert rejected == Rejected("timeout", "not prepared within 2 s")
        for _ in range(2):
            assert isinstance(await replica.encode(version, good, None), Encoded)

    before = set(_children())
    asyncio.run(ask())
    assert len(set(_children()) - before) <= 2, "what hung is gone, not left to run on"


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def test_a_version_is_described_by_its_living_rows(tmp_path):
    index = publish_synthetic(tmp_path / "run", random_units(12), 3, deleted=[0, 1, 2, 3, 9])
    described = describe_version(index.run, index.version, 2)
    assert (sum(described.group_rows), described.rows) == (7, 7)
    alone = describe_version(index.run, index.version, 3)
    assert sorted(alone.group_rows) == [0, 3, 4], "one shard has none left, and its group is not asked"


def test_a_deleted_image_is_said_to_be_deleted_and_nothing_else_of_it(tmp_path):
    index = publish_synthetic(tmp_path / "run", random_units(12), 3, deleted=[0, 9])
    settings = ServeSettings(run_url=str(tmp_path / "run"))
    group, described = ShardReplica(settings, 0), describe_version(index.run, index.version, 1)
    router = SearchRouter(settings, described, None, [group])
    assert asyncio.run(router.look_up(1)).image_id == 1
    with pytest.raises(ApiError, match="image 9 was deleted") as deleted:
        asyncio.run(router.look_up(9))
    assert (deleted.value.status, deleted.value.body["state"]) == (404, "deleted")
    with pytest.raises(ApiError, match="the index has no image 12") as absent:
        asyncio.run(router.look_up(12))
    assert (absent.value.status, "state" in absent.value.body) == (404, False)


@pytest.mark.parametrize("resources", [{"encoder_threads": 2}, {"encoder_threads": 2, "encoder_batch": 4}])
def test_company_and_threads_do_not_change_a_byte(photo_run, version, resources):
    images = [query_view(name) for name in ("coffee", "astronaut", "chelsea")] * 2
    index = open_index(photo_run)
    alone = [index.encode_query(image) for image in images]

    async def ask_at_once() -> list[Encoded | Rejected]:
        return await asyncio.gather(*(replica.encode(version, image, None) for image in images))

    replica = EncoderReplica(ServeSettings(run_url=str(photo_run), query_processes=1, **resources))
    together = asyncio.run(ask_at_once())
    replica.close()
    for one, expected in zip(together, alone, strict=True):
        assert one.vector.tobytes() == expected.vector.tobytes()
        assert one.points.codes.tobytes() == expected.points.codes.tobytes()


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (8, 2, 4), (12, 3, 4), (5, 2, 3)]
)
def test_encoders_follow_the_cores(cores, replicas, threads):
    chosen = local_resources(cores)
    assert (chosen["encoder_replicas"], chosen["encoder_threads"]) == (replicas, threads)
    assert chosen["shard_threads"] == cores
