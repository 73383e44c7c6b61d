"""`ckn-scale report` of a run: what it took, what was predicted, its images, certificate and pictures."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from photo_runs import OVERRIDES
from report_pages import Page, report

from ckn_scale.config import load_settings
from ckn_scale.errors import InputError
from ckn_scale.pipeline import plan
from ckn_scale.report.run_sections import measure_walls
from ckn_scale.runs.estimate import Estimate, StepCost
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference run with a prediction."""
    copied = tmp_path_factory.mktemp("report") / "run"
    shutil.copytree(reference, copied, ignore=shutil.ignore_patterns("samples", "nonces"))
    opened = RunFolder.open(str(copied))
    steps = {"encode_images": asdict(StepCost(2.0, 1e6))}
    estimate = {"steps": steps, "num_images": 22, "worker_memory_mb": 400.0}
    assert set(estimate) <= {one.name for one in fields(Estimate)}  # of which `plan` writes all
    opened.events.write("estimate", **estimate)
    opened.events.flush()
    return copied


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(run, "-o", tmp_path_factory.mktemp("out") / "report.html", "--examples", "1")


def test_sections(page):
    assert page.titles == [
        "The run",
        "Time and throughput",
        "Predicted and actual",
        "Images",
        "Certificate",
        "Filters",
        "Misses and hits",
        "Settings",
    ]
    assert (page.scripts, page.links) == (0, [])


def test_steps_have_their_work_and_wall_time(page, run):
    commits = RunFolder.open(str(run)).commits("encode_images").committed()
    row = next(row for row in page.tables[0] if row[0] == "encode images")
    assert row[1] == f"{len(commits)} of {len(commits)}"
    assert row[2] == f"{sum(commit.seconds for commit in commits.values()):,.1f}"
    assert float(row[3].replace(",", "")) >= float(row[2].replace(",", "")) - 0.1  # one process did all
    assert float(row[4].replace(",", "")) == pytest.approx(22 / float(row[3].replace(",", "")), rel=0.05)
    *steps, total = page.tables[0][1:]
    assert total[0] == "in all"
    for column in (2, 3, 5):
        parts = sum(float(step[column].replace(",", "")) for step in steps if step[column] != "–")
        assert float(total[column].replace(",", "")) == pytest.approx(parts, abs=0.06 * len(steps))


def test_prediction_stands_beside_what_it_took(page):
    work = next(row for row in page.tables[0] if row[0] == "encode images")[2]
    header, row, total = page.tables[1]
    assert header[:4] == ["step", "predicted s", "actual s", "ratio"]
    assert row[:3] == ["encode images", "2.0", work]
    assert float(row[3]) == pytest.approx(float(work) / 2, abs=0.05)
    assert total == ["in all", *row[1:]]  # of what was predicted


def test_images_that_failed_are_named(page):
    failed = page.tables[2]
    assert failed[0] == ["could not be used", "state", "reason"]
    assert [Path(row[0]).name for row in failed[1:]] == ["broken.jpg"]
    assert failed[1][1] == "truncated"


def test_certificate_and_pictures(page, run):
    certificate = RunFolder.open(str(run)).versions.latest().certificate
    sentence = f"{certificate.first} of {certificate.queries} planted queries came back first"
    assert any(sentence in text for text in page.texts)
    assert page.by_class["good"] == ["passed"]
    assert [one.split(":")[0] for one in page.pictures[:3]] == ["ckn-grad", "ckn-raw", "ckn-white"]
    examples = page.by_class["answers"]
    assert len(page.pictures) == 3 + len(examples) * (1 + 5)  # of each the query and five hits
    assert "itself" in examples[-1]  # it came back first, or behind copies
    assert "blank" not in page.by_class


def test_source_out_of_reach_costs_the_example_only(run, photos, tmp_path):
    away = photos.rename(photos.with_name("away"))
    try:
        page = report(run, "-o", tmp_path / "report.html", "--examples", "1")
    finally:
        away.rename(photos)
    assert any("its source is out of reach" in text for text in page.texts)
    assert "wrong" not in page.by_class


def test_run_that_is_only_planned(photos, tmp_path):
    planned = tmp_path / "planned"
    plan(str(photos), str(planned), load_settings("tiny", None, OVERRIDES))
    page = report(planned, "-o", tmp_path / "report.html")
    assert any("images are planned, none is encoded yet" in text for text in page.texts)
    assert "Nothing was predicted" in "".join(page.texts)


def test_no_run_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        report(tmp_path, "-o", tmp_path / "report.html")


def test_walls_add_up_over_drivers():
    def event(kind, at, pid, step="encode_images"):
        return {"kind": kind, "at": at, "host": "a", "pid": pid, "step": step, "n": 1}

    events = [event("step_begins", 0, 1), event("step_begins", 1, 2), event("step_ends", 4, 1)]
    events += [event("step_ends", 6, 2), event("step_begins", 9, 3), event("step_ends", 9, 4)]
    assert measure_walls(events) == {"encode_images": 9}


def test_run_beside_an_evaluation(run, tmp_path):
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"protocol": "groups", "results": [{"descriptor": "ckn", "map": 0.5}]}))
    page = report(file, run, "-o", tmp_path / "report.html", "--examples", "0")
    assert page.titles[-2:] == ["Image retrieval, beside the paper", "groups: groups"]
    assert "Misses and hits" not in page.titles
