"""What the steps compute is pinned: a change of the output asks for a new algorithm version.

Bytes differ between kinds of CPU, so vectors are compared as the numerics promise goes: cosine at
least 0.999. After a change that is meant, raise `version` of the steps whose output changed and write
the file anew: `python tests/e2e/test_golden.py RUN` with a run that the `reference` fixture made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ckn_scale.schemas import read_vectors
from ckn_scale.steps.pipeline import STEPS
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import read_table

GOLDEN = Path(__file__).parent / "golden.npz"
SHARDS = (0, 4)


def read_outputs(run_url: str) -> dict[str, np.ndarray]:
    run = RunFolder.open(run_url)
    commits = run.commits("encode_images").committed()
    outputs: dict[str, np.ndarray] = {}
    for shard in SHARDS:
        vectors = read_table(run.store, commits[shard].files["vectors"])
        points = read_table(run.store, commits[shard].files["descriptors"])
        rows = vectors.filter(vectors.column("vector").is_valid())
        outputs[f"vectors-{shard}"] = read_vectors(rows)
        outputs[f"words-{shard}"] = np.frombuffer(b"".join(points.column("words").to_pylist()), "<u2")
    versions = [f"{name} {kind.version}" for name, kind in sorted(STEPS.items())]
    return {**outputs, "versions": np.array(versions)}


def test_outputs_are_those_of_the_recorded_algorithm_versions(reference):
    golden, found = dict(np.load(GOLDEN)), read_outputs(str(reference))
    assert golden["versions"].tolist() == found["versions"].tolist(), (
        "a version was raised: write the file anew"
    )
    for shard in SHARDS:
        one, other = (side[f"vectors-{shard}"].astype(np.float64) for side in (golden, found))
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        cosines = (one * other).sum(axis=1) / norms
        assert cosines.min() >= 0.999, "the output changed: raise the step's version"
        assert np.mean(golden[f"words-{shard}"] == found[f"words-{shard}"]) >= 0.98


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **read_outputs(sys.argv[1]))
