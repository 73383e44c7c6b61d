"""What `plan` predicts of a run, against what the run then takes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from photo_runs import OVERRIDES, index_here

from ckn_scale.config import load_settings
from ckn_scale.core.coarse_lists import learn_lists, predict_memory
from ckn_scale.core.flattening import supported_directions
from ckn_scale.core.numerics import set_compute_threads
from ckn_scale.core.pca import COLUMNS_PER_BLOCK
from ckn_scale.core.specs import ReductionSpec
from ckn_scale.processes import SPAWN
from ckn_scale.runs.estimate import SAMPLE_STEPS, _on_line, _reduction_bytes, estimate_run
from ckn_scale.runs.estimate_index import estimate_index
from ckn_scale.runs.step_sizes import count_point_words, count_sgd_steps, list_sizes
from ckn_scale.steps.learn_quantiser import choose_kind
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.train_reduction import learn_reduction
from ckn_scale.storage.index_files import IndexManifest
from ckn_scale.storage.run_folder import RunFolder


def test_what_was_measured_twice_goes_on_in_a_line():
    assert _on_line(8, 10.0, 16, 14.0, 1000) == 506.0
    assert _on_line(8, 10.0, 16, 9.0, 1000) == 9.0, "noise: nothing falls with size"
    assert _on_line(0, 3.0, 0, 4.0, 0) == 4.0, "what does not grow"


def test_sizes_are_bounded_by_the_patches_that_there_are():
    settings = load_settings("compact")
    few, many = list_sizes(settings, 10, 10, 500), list_sizes(settings, 20_000, 10**6, 40_000)
    assert few["train_codebook"].work == 2 * 500
    assert many["train_codebook"].work == 2 * settings.vlad.num_descriptors
    assert many["sample_vlads"].work == settings.reduction.num_images < 20_000
    assert many["encode_images"].work == 10**6


@pytest.mark.parametrize(
    ("images", "words", "more_words", "taught_by", "directions", "kind"),
    [
        (20, 128, 128, 0, 0, None),
        (100, 1024, 1024, 0, 0, None),
        (1_500, 4096, 4096, 1_500, 46, None),
        (100_000, 4096, 16_384, 4096, 128, "pq"),
        (50_000_000, 4096, 16_384, 4096, 128, "ivf-pq"),
    ],
)
def test_a_collection_gets_words_directions_and_a_kind_that_its_size_supports(
    images, words, more_words, taught_by, directions, kind
):
    settings, sampled = load_settings("compact"), min(images, 20_000)
    patches = min(800 * sampled, settings.sample.num_patches)
    assert count_point_words(settings, sampled, patches) == words
    assert count_point_words(settings, sampled, min(800 * sampled, 200_000)) == more_words
    fitted = int(list_sizes(settings, sampled, images, patches)["sample_vlads"].work)
    assert (fitted, supported_directions(fitted, background=False)) == (taught_by, directions)
    assert choose_kind(settings.index.kind, IndexManifest("", 32768, images, {}, (), "signs")) == kind


def test_sgd_is_predicted_by_its_steps():
    """41 rates for 1,000 steps each, then 300,000: not 41 times all of them, and not two rates."""
    steps = count_sgd_steps(load_settings("paper").training)
    assert 41 * 1000 < steps["search_rates"] < 1.1 * 41 * 1000
    assert 300_000 < steps["train_layer"] < 1.1 * 300_000
    assert count_sgd_steps(load_settings("compact").training) == {}


def test_sgd_is_timed_by_its_steps(photos, tmp_path):
    """And the rehearsal finds filters to go on with, as no few steps of SGD would."""
    sgd = ["training.solver=sgd", "training.sgd_iterations=1000000", "training.sgd_validate_every=100"]
    settings = load_settings("tiny", None, [*OVERRIDES, *sgd])
    steps = estimate_run(plan_images(str(tmp_path / "run"), settings, str(photos)), settings).steps
    searching, descending = steps["search_rates"].seconds, steps["train_layer"].seconds
    counts = count_sgd_steps(settings.training)
    # Both are a step's time times their number: a busy machine moves that little, a wrong number a lot.
    assert 0.2 < (searching / descending) / (counts["search_rates"] / counts["train_layer"]) < 5
    assert descending > 1e6 * 50e-6, "no processor takes a step of four layers in 50 µs"


def test_joining_with_neighbours_grows_with_the_square_and_short_codes_in_a_line():
    settings = load_settings("compact", None, ["index.augment=5"])
    few, many = (
        estimate_index(settings, rows, 8192).steps["augment_index"].seconds for rows in (10**5, 10**6)
    )
    assert 30 < many / few < 300, "a hundredfold, but for noise and what is done once a row"
    assert estimate_index(load_settings("compact"), 1000, 32768).lines() == []
    coded = estimate_index(load_settings("compact"), 10**6, 32768)
    assert (coded.kind, coded.code_bytes) == ("pq", 128)
    assert 300e6 < coded.serving_bytes < 600e6  # benchmarks/scale.py: 435 MB
    assert coded.steps["make_codes"].stored_bytes == 132 * 10**6
    listed = estimate_index(load_settings("compact"), 10**8, 32768)
    assert listed.kind == "ivf-pq"
    assert listed.learning_bytes > coded.learning_bytes
    assert "short codes (ivf-pq): 128 bytes an image in memory" in listed.lines()[0]


class Vlads(Sequence):
    """Blocks of columns that are made when they are asked for, as `SampledVlads` reads them."""

    def __init__(self, count, dim):
        self.count, self.dim = count, dim

    def __len__(self):
        return -(-self.dim // COLUMNS_PER_BLOCK)

    def __getitem__(self, position):
        if position >= len(self):
            raise IndexError(position)
        rng, width = np.random.default_rng(position), min(self.dim, COLUMNS_PER_BLOCK)
        block = np.empty((self.count, width), np.float16)
        for rows in np.split(block, range(64, self.count, 64)):
            rows[:] = rng.standard_normal(rows.shape, np.float32)
        return block


def learn_and_weigh(method, count, dim, directions):
    """How many bytes this process grows by while a reduction is learned, and how many are predicted."""
    set_compute_threads(1)
    learn_reduction(Vlads(200, 64), 200, ReductionSpec(min_images=2), background=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of imports, is forgotten
    before = read_memory("RssAnon")
    spec = ReductionSpec(method, num_images=count, dim=directions)
    learn_reduction(Vlads(count, dim), count, spec, background=False)
    # Pages of libraries come and go as the machine pleases: they are no part of what is predicted.
    grown = read_memory("VmHWM") - read_memory("RssFile") - before
    return grown, _reduction_bytes(count, dim, directions)


def read_memory(name):
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize(
    ("method", "count", "dim", "directions"),
    [("flatten", 3072, 4096, 96), ("pca", 600, 32768, 140), ("pca", 1800, 1024, 460)],
    ids=["pairs and a block", "directions", "eigenvectors"],
)
def test_memory_of_the_reduction_is_predicted_within_a_quarter(method, count, dim, directions):
    with ProcessPoolExecutor(1, SPAWN) as pool:
        grown, predicted = pool.submit(learn_and_weigh, method, count, dim, directions).result()
    assert 0.75 < predicted / grown < 1.25


def learn_lists_and_weigh(dim, lists):
    set_compute_threads(1)
    rows = np.random.default_rng(0).standard_normal((lists + 40, dim), np.float32)
    learn_lists(rows[:, :64].__getitem__, 20, 3, 0)
    Path("/proc/self/clear_refs").write_text("5")
    before = read_memory("VmRSS")
    learn_lists(rows.__getitem__, len(rows), lists, 0)
    return read_memory("VmHWM") - before, predict_memory(dim, lists)


def test_memory_of_lists_is_predicted_within_a_fifth():
    with ProcessPoolExecutor(1, SPAWN) as pool:
        grown, predicted = pool.submit(learn_lists_and_weigh, 32768, 256).result()
    assert 0.8 < predicted / grown < 1.2


def test_bytes_are_predicted_within_a_quarter(photos, tmp_path):
    """Of time only an order of magnitude is looked at here: `benchmarks/estimate.py` measures it."""
    run = str(tmp_path / "run")
    settings = load_settings("tiny", None, OVERRIDES)
    estimate = estimate_run(plan_images(run, settings, str(photos)), settings)
    index_here(photos, run, keep_samples=True)
    sizes = {path: path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()}
    samples = sum(size for path, size in sizes.items() if "samples" in path.relative_to(tmp_path).parts)
    assert 0.75 < estimate.sample_bytes / samples < 1.25
    assert _find_sampling_steps(RunFolder.open(run)) == set(SAMPLE_STEPS)
    assert set(estimate.steps) > {"sample_patches", "train_layer", "encode_images", "certify_index"}
    for step in ("sample_patches", "train_layer", "sample_vlads", "encode_images"):
        assert estimate.steps[step].seconds > 0, step
    assert any("samples until it is published" in line for line in estimate.lines())


def _find_sampling_steps(run):
    """The steps that wrote below samples/."""
    commits = [commit for log in run.logs() for commit in run.commits(log).committed().values()]
    return {
        commit.step.split("-")[0]
        for commit in commits
        if any(file.path.startswith("samples/") for file in commit.files.values())
    }
