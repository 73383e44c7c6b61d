"""A run and its images on S3: what the server reads there, and when."""

from __future__ import annotations

import pytest
from running_server import local_server_of, query_view

from ckn_scale.config import Resources, load_settings
from ckn_scale.demo import PHOTOS
from ckn_scale.pipeline import index_images
from ckn_scale.storage.store import Store

LATER_S = 3600.0  # when the next version is looked for


@pytest.fixture
def run_on_s3(s3, photo_run, photo_folder):
    """Four photographs below photos/, described by the models of another run."""
    url = s3.url("served")
    for name in PHOTOS[:4]:
        Store(f"{url}/photos").write_new(f"{name}.jpg", (photo_folder / f"{name}.jpg").read_bytes())
    settings = load_settings("tiny", None, ["plan.images_per_shard=4"])
    index_images(
        f"{url}/photos", f"{url}/run", settings, Resources(workers=0), models=str(photo_run), accept=True
    )
    return url


def test_answers_read_nothing_from_the_store_and_originals_come_from_listed_prefixes(
    run_on_s3, photo_folder, s3_faults
):
    prefixes = (f"{run_on_s3}/photos/",)
    with local_server_of(
        f"{run_on_s3}/run", shard_groups=1, version_poll_s=LATER_S, uri_prefixes=prefixes
    ) as server:
        opened = s3_faults.counts["fine"]
        assert opened, "the run is read through the proxy"
        first = server.search(query_view(PHOTOS[0]), k=4).json()
        assert first["hits"][0]["uri"] == f"{run_on_s3}/photos/{PHOTOS[0]}.jpg"
        image_id = first["hits"][0]["image_id"]
        server.search(query_view(PHOTOS[1]), k=4, expand=True, group_copies=True).raise_for_status()
        for path in (f"/v1/similar/{image_id}", f"/v1/images/{image_id}", "/v1/examples", "/v1/index"):
            server.client.get(path).raise_for_status()
        assert s3_faults.counts["fine"] == opened, "answering reads nothing from the store"
        original = server.client.get(f"/v1/images/{image_id}/original")
        assert original.content == (photo_folder / f"{PHOTOS[0]}.jpg").read_bytes()
        assert original.headers["content-type"] == "image/jpeg"
        assert s3_faults.counts["fine"] > opened
    with local_server_of(
        f"{run_on_s3}/run", version_poll_s=LATER_S, uri_prefixes=(f"{run_on_s3}/run/",)
    ) as closed:
        assert closed.client.get(f"/v1/images/{image_id}").json()["original"] is False
        assert closed.client.get(f"/v1/images/{image_id}/original").status_code == 403
