"""Models that are taken over from another run."""

from __future__ import annotations

import pytest

from ckn_scale.config import load_settings
from ckn_scale.errors import InputError, RunMismatch
from ckn_scale.steps.record_models import adopt_models
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.run_records import Generation
from ckn_scale.storage.stored_files import StoredFile


def make_run(folder, sha256=None):
    run = RunFolder.create(str(folder), load_settings("tiny").model_dump(mode="json"))
    if sha256 is not None:
        run.models.create(Generation(1, {"encoder": StoredFile("models/encoder", sha256, 1)}))
    return run


def test_a_run_with_models_goes_on_with_the_same_ones_only(tmp_path):
    run, same, other = (make_run(tmp_path / name, sha) for name, sha in (("a", "1"), ("b", "1"), ("c", "2")))
    adopt_models(run, same.url)
    assert run.models.numbers() == [1]
    with pytest.raises(RunMismatch, match=r"has models of its own.*leave --models out"):
        adopt_models(run, other.url)


def test_a_run_without_models_has_none_to_take_over(tmp_path):
    with pytest.raises(InputError, match="has no models to take over"):
        adopt_models(make_run(tmp_path / "a"), make_run(tmp_path / "b").url)
