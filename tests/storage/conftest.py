"""Every test that takes `store_url` or `store` runs on a local disk and on a real S3 server."""

from __future__ import annotations

import pytest

from ckn_scale.storage.retries import RetryPolicy
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store

QUICK = RetryPolicy(attempts=4, first_delay_s=0.01, max_delay_s=0.02)


@pytest.fixture(params=["local", "s3"])
def store_url(request, tmp_path) -> str:
    return str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3").url("run")


@pytest.fixture
def store(store_url) -> Store:
    return Store(store_url, retry=QUICK)


@pytest.fixture
def run(store_url) -> RunFolder:
    return RunFolder.create(store_url, {"encode": {"max_keypoints": 800}})


@pytest.fixture
def damage(store):
    """Replace a file behind the store's back, as bit rot or a torn write would."""

    def replace(path: str, data: bytes) -> None:
        if store.is_local:
            store.local_path(path).write_bytes(data)
        else:
            store.fs.pipe_file(store.address(path), data)

    return replace


@pytest.fixture
def tmp_path_store(tmp_path) -> Store:
    """A local store, where the kind of store makes no difference."""
    return Store(tmp_path / "store")
