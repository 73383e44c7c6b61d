"""One image that kills its process and one that hangs cost one row each, in a pool."""

from __future__ import annotations

from photo_runs import tiny_options
from poison import POISON, assert_two_rows_lost, copy_with_poison, poison_options


def test_poison_images_cost_one_row_each_in_a_pool(photos, reference, command_line, tmp_path):
    folder, run = copy_with_poison(photos, tmp_path / "photos"), tmp_path / "run"
    options = [*tiny_options(), *poison_options(reference), "--workers", "2"]
    result = command_line("index", folder, run, *options, env=POISON)
    assert result.returncode == 0, result.stderr
    assert_two_rows_lost(run)
