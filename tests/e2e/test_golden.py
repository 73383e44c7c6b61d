"""What the steps compute is pinned: a change of the output asks for a new algorithm version.

Pinned are `tiny` (three channels in closed form, points, signs), each reduction of its VLADs, without and
with a background, and a channel that was learned by SGD.

Bytes differ between kinds of CPU, so outputs are compared as the numerics promise goes: of vectors whose
cosine is 0.999, one sign in seventy differs. After a change that is meant, raise `version` of the steps
whose output changed and write the file anew: `PYTHONPATH=tests python tests/e2e/test_golden.py`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from photo_runs import background_photos, finish_with_background, index_here, make_photos

from ckn_scale import pipeline
from ckn_scale.config import Resources, load_settings, parse_settings
from ckn_scale.core.specs import ReductionSpec
from ckn_scale.core.vector_codes import make_codec
from ckn_scale.core.vlad import assign_words
from ckn_scale.schemas import read_codes
from ckn_scale.step import Step
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.train_reduction import SampledVlads, learn_reduction
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.stored_files import read_table

GOLDEN = Path(__file__).parent / "golden.npz"
BYTES_OF_FACTORS = 8  # two floats behind the signs of a vector
SGD = (
    "training.solver=sgd",
    "training.sgd_iterations=60",
    "training.sgd_validate_every=20",
    "training.sgd_rate_candidates=16",
    "reduction.method=none",
)


def make_runs(photos: Path, reference: Path, folder: Path) -> dict[str, RunFolder]:
    (folder / "others").mkdir()
    others = background_photos(folder / "others")
    tree = load_settings("tiny", None, SGD).model_dump(mode="json")
    settings = parse_settings({**tree, "channels": tree["channels"][:1]})  # so little SGD ruins the others
    sgd = plan_images(str(folder / "sgd"), settings, str(photos))
    with pipeline.open_driver(sgd, Resources(workers=0), lambda progress: None) as driver:
        pipeline.train(driver)
    return {
        "tiny": RunFolder.open(str(reference)),
        "background": finish_with_background(reference, others, folder / "with-background"),
        "sgd": sgd,
    }


def read_outputs(runs: dict[str, RunFolder], photo: bytes) -> dict[str, np.ndarray]:
    outputs = {
        "tiny-signs": read_vectors(runs["tiny"], 0, 4)[:, :-BYTES_OF_FACTORS],
        "tiny-words": read_points(runs["tiny"], "words", "<u2"),
        "tiny-codes": read_points(runs["tiny"], "codes", "<u8")[::5],
        "tiny-frames": read_points(runs["tiny"], "frames", "u1")[:540],
        "tiny-pca-similarities": reduce(runs["tiny"], ReductionSpec("pca", "float16", dim=8)),
        "tiny-flatten-similarities": reduce(runs["tiny"], ReductionSpec(min_images=8)),
        "background-flatten-similarities": reduce(runs["background"], ReductionSpec(min_images=8)),
        "background-signs": read_vectors(runs["background"], 0)[:, :-BYTES_OF_FACTORS],
    }
    for run in ("tiny", "sgd"):
        outputs |= {f"{run}-{name}": values for name, values in describe(runs[run], photo).items()}
    kinds = [kind for kind in vars(pipeline).values() if isinstance(kind, type) and issubclass(kind, Step)]
    versions = sorted(f"{kind.name} {kind.version}" for kind in kinds if kind is not Step)
    return {**outputs, "versions": np.array(versions)}


def read_vectors(run: RunFolder, *shards: int) -> np.ndarray:
    commits = run.commits("encode_images").committed()
    tables = [read_table(run.store, commits[shard].files["vectors"]) for shard in shards]
    return np.concatenate([read_codes(one.filter(one.column("vector").is_valid())) for one in tables])


def read_points(run: RunFolder, column: str, dtype: str) -> np.ndarray:
    points = read_table(run.store, run.commits("encode_images").committed()[0].files["descriptors"])
    return np.frombuffer(b"".join(points.column(column).to_pylist()), dtype)


def describe(run: RunFolder, photo: bytes) -> dict[str, np.ndarray]:
    """The words of a photograph's strongest points in each channel, and how similar their descriptors are."""
    encoder, outputs = EncodeImages(run).encoder, {}
    patches = encoder.preprocessor.prepare(photo).patches[:60]
    for channel in encoder.channels:
        name = channel.name
        rows = channel.descriptor.describe(patches)
        outputs[f"{name}-words"] = assign_words(rows, channel.centroids).astype(np.uint8)
        outputs[f"{name}-similarities"] = (rows[:16] @ rows[:16].T).astype(np.float16)
    return outputs


def reduce(run: RunFolder, spec: ReductionSpec) -> np.ndarray:
    """How similar some of its VLADs are once they are reduced and stored."""
    vlads, background = SampledVlads(run), run.background.latest() is not None
    reduction = learn_reduction(vlads, vlads.num_images, spec, background=background)
    rows = reduction.apply(np.concatenate(vlads[:], axis=1).astype(np.float32)[:12])
    if spec.stored == "float16":
        codec = make_codec(spec.stored, reduction.dim)
        rows = codec.decode(codec.encode(rows))
    return (rows @ rows.T).astype(np.float16)


@pytest.fixture(scope="module")
def found(photos, reference, tmp_path_factory):
    runs = make_runs(photos, reference, tmp_path_factory.mktemp("golden"))
    return read_outputs(runs, (photos / "coffee.jpg").read_bytes())


def test_the_file_has_everything_that_is_compared(found):
    golden = np.load(GOLDEN)
    assert set(golden) == set(found)
    kinds = {name.split("-")[1] for name in golden if name.startswith("tiny-") and "similar" in name}
    assert kinds == {"grad", "white", "raw", "pca", "flatten"}


def test_versions_are_the_recorded_ones(found):
    assert np.load(GOLDEN)["versions"].tolist() == found["versions"].tolist(), "raised: write the file anew"


@pytest.mark.parametrize("name", sorted(set(np.load(GOLDEN)) - {"versions"}))
def test_outputs_are_those_of_the_recorded_algorithm_versions(name, found):
    golden, now = np.load(GOLDEN)[name], found[name]
    assert golden.shape == now.shape
    changed = f"{name} changed: raise the version of the steps that make it"
    if name.endswith(("signs", "codes")):
        one, two = (np.unpackbits(np.ascontiguousarray(values).view(np.uint8)) for values in (golden, now))
        assert np.mean(one == two) >= 0.985, changed
    elif name.endswith(("words", "frames")):
        assert np.mean(golden == now) >= 0.98, changed
    else:
        assert np.abs(golden.astype(float) - now).mean() <= 0.003, changed


def write_anew() -> None:
    """The file as this code makes it."""
    with TemporaryDirectory() as temp:
        folder = Path(temp)
        (folder / "photos").mkdir()
        photos = make_photos(folder / "photos")
        index_here(photos, folder / "reference", keep_samples=True)
        runs = make_runs(photos, folder / "reference", folder)
        np.savez_compressed(GOLDEN, **read_outputs(runs, (photos / "coffee.jpg").read_bytes()))


if __name__ == "__main__":
    write_anew()
