"""What the steps compute is pinned: a change of the output asks for a new algorithm version.

Bytes differ between kinds of CPU, so vectors are compared as the numerics promise goes: of vectors whose
cosine is 0.999, one sign in seventy differs. After a change that is meant, raise `version` of the steps
whose output changed and write the file anew: `PYTHONPATH=tests python tests/e2e/test_golden.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from photo_runs import background_photos, finish_with_background, index_here, make_photos

from ckn_scale import pipeline
from ckn_scale.schemas import read_codes
from ckn_scale.step import Step
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table

GOLDEN = Path(__file__).parent / "golden.npz"
SHARDS = (0, 4)
BYTES_OF_FACTORS = 8  # two floats behind the signs of a vector


def read_outputs(run_url: str, with_background: str) -> dict[str, np.ndarray]:
    outputs = read_shards(run_url, SHARDS) | {
        f"background-{name}": values for name, values in read_shards(with_background, SHARDS[:1]).items()
    }
    kinds = [kind for kind in vars(pipeline).values() if isinstance(kind, type) and issubclass(kind, Step)]
    versions = sorted(f"{kind.name} {kind.version}" for kind in kinds if kind is not Step)
    return {**outputs, "versions": np.array(versions)}


def read_shards(run_url: str, shards: Sequence[int]) -> dict[str, np.ndarray]:
    run = RunFolder.open(run_url)
    commits = run.commits("encode_images").committed()
    outputs: dict[str, np.ndarray] = {}
    for shard in shards:
        vectors = read_table(run.store, commits[shard].files["vectors"])
        points = read_table(run.store, commits[shard].files["descriptors"])
        rows = vectors.filter(vectors.column("vector").is_valid())
        outputs[f"signs-{shard}"] = read_codes(rows)[:, :-BYTES_OF_FACTORS]
        outputs[f"words-{shard}"] = np.frombuffer(b"".join(points.column("words").to_pylist()), "<u2")
    return outputs


def test_outputs_are_those_of_the_recorded_algorithm_versions(reference, tmp_path):
    """All three channels, centred and with directions, in signs."""
    others = tmp_path / "others"
    others.mkdir()
    other = finish_with_background(reference, background_photos(others), tmp_path / "run")
    golden, found = dict(np.load(GOLDEN)), read_outputs(str(reference), other.url)
    assert golden["versions"].tolist() == found["versions"].tolist(), (
        "a version was raised: write the file anew"
    )
    for name, expected in golden.items():
        if "signs" in name:
            one, two = np.unpackbits(expected, axis=1), np.unpackbits(found[name], axis=1)
            assert np.mean(one == two, axis=1).min() >= 0.985, "the output changed: raise the step's version"
        elif "words" in name:
            assert np.mean(expected == found[name]) >= 0.98


def write_anew() -> None:
    """The file as this code makes it."""
    with TemporaryDirectory() as temp:
        folder = Path(temp)
        (folder / "photos").mkdir()
        (folder / "others").mkdir()
        index_here(make_photos(folder / "photos"), folder / "reference", keep_samples=True)
        background_photos(folder / "others")
        other = finish_with_background(folder / "reference", folder / "others", folder / "run")
        np.savez_compressed(GOLDEN, **read_outputs(str(folder / "reference"), other.url))


if __name__ == "__main__":
    write_anew()
