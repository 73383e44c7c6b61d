"""Index on a Ray cluster of two nodes with a fake GPU each: `two_nodes.py PHOTOS RUN`."""

from __future__ import annotations

import json
import os
import sys

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
from photo_runs import OVERRIDES
from ray.cluster_utils import Cluster

from ckn_scale.config import Resources, load_settings
from ckn_scale.runners.index_images import index_images


def main(photos: str, run: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    try:
        cluster.add_node(num_cpus=1, num_gpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = len(ray.nodes())
        index_images(photos, run, load_settings("tiny", None, OVERRIDES), Resources(workers=2, ray="auto"))
        ray.shutdown()
    finally:
        cluster.shutdown()
    print(json.dumps({"nodes": nodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
