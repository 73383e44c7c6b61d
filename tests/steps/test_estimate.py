"""What `plan` predicts of a run, against what the run then takes."""

from __future__ import annotations

from photo_runs import OVERRIDES, index_here

from ckn_scale.config import load_settings
from ckn_scale.runs.estimate import _on_line, estimate_run, list_sizes
from ckn_scale.steps.plan_images import plan_images


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


def test_bytes_are_predicted_within_a_quarter(photos, tmp_path):
    """Of time only an order of magnitude is looked at here: `benchmarks/estimate.py` measures it."""
    run = str(tmp_path / "run")
    settings = load_settings("tiny", None, OVERRIDES)
    estimate = estimate_run(plan_images(run, settings, str(photos)), settings)
    index_here(photos, run, keep_samples=True)
    sizes = {path: path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()}
    samples = sum(size for path, size in sizes.items() if "samples" in path.relative_to(tmp_path).parts)
    assert 0.75 < estimate.sample_bytes / samples < 1.25
    assert set(estimate.steps) > {"sample_patches", "train_layer", "encode_images", "certify_index"}
    assert estimate.steps["encode_images"].seconds > 0
    assert any("samples until it is published" in line for line in estimate.lines())
