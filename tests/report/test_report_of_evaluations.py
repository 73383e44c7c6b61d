"""`ckn-scale report` of evaluations: their figures beside the paper's, in a page that needs nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from report_pages import Page, read_page, report

from ckn_scale.errors import InputError
from ckn_scale.evaluate.studies.declared import STUDIES
from ckn_scale.report.charts import choose_axis, draw_lines
from ckn_scale.report.html import make, write_page
from ckn_scale.report.paper import FINDINGS, PRINTED_STUDIES

HOSTILE = "<script>alert(1)<b onload=x>&\"'\udcff\x00.jpg"
SHOWN = "<script>alert(1)<b onload=x>&\"'\\udcff\\x00.jpg"
HOLIDAYS = {
    "protocol": "holidays",
    "data": f"/data/{HOSTILE}",
    "images": 422,
    "queries": 150,
    "trained_on": "bsds500",
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gb": 24.0, "releases": {"torch": "2.13"}},
    "settings": {"vlad": {"num_words": 64}, "channels": [{"weight": 1.0}]},
    "results": [
        {"descriptor": "sift", "dim": 8192, "map": 0.755, "spread": 0.009, "recall_at": {"1": 0.4, "5": 0.8}},
        {
            "descriptor": "ckn-grad",
            "dim": 16384,
            "map": 0.827,
            "recall_at": {"1": 0.5, "5": 0.9},
            "grid": [{"region": 8.0, "map": 0.827}, {"region": 12.0, "map": 0.8}],
            "examples": [
                {
                    "query": f"/data/{HOSTILE}",
                    "score": 0.25,
                    "relevant": 2,
                    "answer": [{"image": "/data/a.jpg", "right": False}, {"image": "/b.jpg", "right": True}],
                }
            ],
        },
        {"descriptor": "ckn-grad", "reduction": "signs", "dim": 16384, "map": 0.81, "bytes": 2056},
    ],
}
UKBENCH = {"protocol": "ukbench", "results": [{"descriptor": "rootsift", "dim": 8192, "score": 3.797}]}


@pytest.fixture
def page(tmp_path) -> Page:
    files = []
    for name, content in (("holidays", HOLIDAYS), ("ukbench", UKBENCH)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    return report(*files, "-o", tmp_path / "report.html")


def test_figures_stand_beside_those_of_the_paper(page):
    table = page.tables[0]
    assert table[0][2:] == [f"{SHOWN}: here", "paper: Holidays", "ukbench: here", "paper: UKBench"]
    rows = {row[0]: row[1:] for row in table[1:]}
    assert rows["SIFT"] == ["8,192", "75.5", "64.0", "not measured", "3.44"]
    assert rows["CKN-grad"] == ["16,384", "82.7", "66.5", "not measured", "3.42"]
    assert rows["RootSIFT"] == ["8,192", "not measured", "–", "3.797", "–"]
    assert rows["CKN-mix"] == ["–", "not measured", "79.3", "not measured", "3.76"]
    paper = [
        "SIFT",
        "RootSIFT",
        "AlexNet-conv1",
        "AlexNet-conv3",
        "PhilippNet 64 × 64",
        "CKN-grad",
        "CKN-mix",
    ]
    assert [name for name in rows if name in paper] == paper  # in its order
    assert any("422 images; 150 queries; learned on bsds500" in text for text in page.texts)
    assert any("1,491 images, 500 queries" in text for text in page.texts)


def test_best_figure_of_a_column_is_bold(page):
    assert sorted(page.by_class["best"]) == ["3.797", "82.7"]


def test_page_is_self_contained_and_escaped(page):
    assert page.scripts == 0
    assert page.links == []
    assert any(SHOWN in text for text in page.texts)
    assert "default-src 'none'" in page.source


def test_rows_curves_examples_and_settings_are_there(page):
    assert page.titles[1:] == [f"{SHOWN}: holidays", "ukbench: ukbench"]
    names = [row[0] for row in page.tables[1][1:]]
    assert names == ["ckn-grad", "ckn-grad, signs", "sift"]  # best first
    assert page.charts == [
        "mAP by half side of the patch, in detection scales: ckn-grad",
        "recall in % by images looked at: ckn-grad, sift",
    ]
    assert page.by_class["blank"] == ["not at hand"] * 3
    assert "vlad.num_words = 64" in page.texts
    assert any("Some CPU, 2 cores, 24.0 GB; torch 2.13" in text for text in page.texts)


def test_examples_show_the_images_where_they_are_at_hand(tmp_path, photos):
    content = copy.deepcopy(HOLIDAYS)
    answer = [{"image": "/gone.jpg", "right": False}, {"image": str(photos / "coffee.jpg"), "right": True}]
    answer.append({"image": str(photos / "cat.jpg"), "right": False})  # after all that is to be found
    example = {"query": str(photos / "rocket.jpg"), "box": [10, 10, 200, 200], "score": 1, "relevant": 1}
    content["results"][1]["examples"] = [{**example, "answer": answer}]
    file = tmp_path / "e.json"
    file.write_text(json.dumps(content))
    page = report(file, "-o", tmp_path / "report.html")
    assert page.pictures == ["rocket.jpg", "coffee.jpg"]
    assert page.by_class["blank"] == ["not at hand"]


def test_report_never_overwrites_unless_asked(tmp_path):
    file, out = tmp_path / "e.json", tmp_path / "report.html"
    file.write_text(json.dumps(UKBENCH))
    out.write_text("mine")
    with pytest.raises(InputError, match="exists: give another --out, or --overwrite"):
        report(file, "-o", out)
    assert out.read_text() == "mine"
    report(file, "-o", out, "--overwrite")
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not what `ckn-scale evaluate --json` writes"),
        ('{"protocol": "holidays", "results": []}', "results: List should have at least 1 item"),
        ('{"protocol": "x", "results": [{"descriptor": "sift"}]}', "sift has none of fpr95, map, score"),
        ('{"protocol": "x", "results": [{"descriptor": "sift", "map": "high"}]}', "results.0.map"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"bad\.json") as raised:
        report(file, "-o", tmp_path / "report.html")
    assert sentence in str(raised.value)
    assert not (tmp_path / "report.html").exists()


def test_pairs_of_scenes_become_curves(tmp_path):
    pairs = [{"scene": "graf", "pair": f"1-{k}", "ap": 0.9 / k} for k in (2, 3)]
    pairs += [{"scene": "boat", "pair": f"1-{k}", "ap": 0.5} for k in (2, 3)]
    row = {"descriptor": "sift", "map": 0.45, "pairs": pairs, "per_scene": {"graf": 0.4, "boat": 0.5}}
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"protocol": "mikolajczyk", "results": [row]}))
    page = report(file, "-o", tmp_path / "report.html")
    assert page.charts == ["mean AP in points by second image of the pair: sift"]
    assert page.tables[1] == [["descriptor", "mAP", "boat", "graf"], ["sift", "45.0", "50.0", "40.0"]]


def test_false_positive_rates_are_best_when_low(tmp_path):
    rows = [{"descriptor": "sift", "fpr95": 0.2, "score": 0.8}, {"descriptor": "ckn-grad", "fpr95": 0.1}]
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"protocol": "fpr95", "results": rows}))
    page = report(file, "-o", tmp_path / "report.html")
    assert page.by_class["best"] == ["10.0"]
    assert ["SIFT", "–", "20.0", "19.90"] in page.tables[0]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([71.2, 78.6], [70.0, 72.0, 74.0, 76.0, 78.0, 80.0]),
        ([5.0], [5.0, 6.0]),
        ([0.0], [0.0, 0.2]),
    ],
)
def test_axis_has_round_ticks_around_its_values(values, ticks):
    axis = choose_axis(values)
    assert axis.ticks == pytest.approx(ticks)
    assert all(0 <= axis.place(value) <= 1 for value in values)


def test_text_between_elements_stays_in_its_place():
    page = read_page(
        write_page("t", "s", [make("section", make("h2", "a"), make("p", "1 ", make("b", "2"), " 3"))])
    )
    assert "1 2 3" in page.texts


def test_evaluation_without_notes_is_shown(tmp_path):
    bare = copy.deepcopy(UKBENCH)
    bare["results"][0] = {"descriptor": "ckn", "score": 3.9}
    file = Path(tmp_path / "bare.json")
    file.write_text(json.dumps(bare))
    assert report(file, "-o", tmp_path / "report.html").titles[-1] == "ukbench: ukbench"


def test_study_has_a_table_and_a_chart_for_each_panel(tmp_path):
    rows = [
        {"panel": panel, "series": series, "x": x, "figure": figure}
        for panel in ("dims", "orientations")
        for series, x, figure in (("none", 8, 0.5), ("full", 8, 0.625), ("none", 16, 0.75))
    ]
    rows.append({"panel": "dims", "series": "full", "x": 16, "figure": None, "reason": "<b>too large</b>"})
    study = {
        "study": "projection",
        "question": "PCA",
        "unit": "mAP in points",
        "protocol": "rome",
        "rows": rows,
    }
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study))
    page = report(file, "-o", tmp_path / "report.html")
    assert page.titles == ["Study: PCA"]
    assert page.tables[0] == [["dims", "none", "full"], ["8", "50.0", "62.5"], ["16", "75.0", "–"]]
    assert page.charts == ["mAP in points by dims: none, full", "mAP in points by orientations: none, full"]
    assert "full, 16: <b>too large</b>" in page.texts
    file.write_text(json.dumps({**study, "rows": [{"panel": "p"}]}))
    with pytest.raises(InputError, match=r"is not what `ckn-scale study` writes: rows\.0\.series"):
        report(file, "-o", tmp_path / "other.html")


def test_study_of_the_paper_stands_beside_its_figures(tmp_path):
    rows = [
        {"panel": "queries", "series": name, "x": x, "figure": 0.5, "spread": 0.012}
        for name in ("sift", "ckn-white")
        for x in ("Hessian-Affine, crop", "dense, crop")
    ]
    study = {"study": "crop", "question": "crop", "unit": "mAP", "protocol": "oxford", "rows": rows}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study))
    page = report(file, "-o", tmp_path / "report.html")
    assert page.tables[0] == [
        ["queries", "sift", "ckn-white", "paper: sift"],
        ["Hessian-Affine, crop", "50.0 ± 1.2", "50.0 ± 1.2", "43.7"],
        ["dense, crop", "50.0 ± 1.2", "50.0 ± 1.2", "47.6"],
    ]
    assert any("Whole queries favour dense points" in text for text in page.texts)
    assert any("measured on Oxford5k, 55 queries" in text for text in page.texts)


def test_settings_of_further_studies_are_what_differs(tmp_path):
    rows = [{"panel": "dims", "series": "none", "x": 8, "figure": 0.5}]
    study = {"study": "projection", "question": "PCA", "unit": "mAP", "protocol": "rome", "rows": rows}
    files = [tmp_path / name / "study.json" for name in ("one", "two")]
    for words, file in zip((64, 32), files, strict=True):
        file.parent.mkdir()
        file.write_text(json.dumps({**study, "settings": {"vlad": {"num_words": words, "seed": 0}}}))
    page = report(*files, "-o", tmp_path / "report.html")
    assert "ckn-scale: one, two" in page.texts
    assert page.source.count("vlad.num_words = 64") == page.source.count("vlad.num_words = 32") == 1
    assert page.source.count("vlad.seed = 0") == 1


def test_lines_join_numbers_and_no_kinds():
    """Long names of kinds are slanted, and the chart is as much higher."""
    values = {"sift": [1.0, 2.0]}
    numbers = draw_lines([8.0, 16.0], values, x_label="x", y_label="y")
    kinds = draw_lines(["dense, no crop" * 3, "crop"], values, x_label="x", y_label="y")
    assert len(numbers.findall("polyline")) == 1
    assert not kinds.findall("polyline")
    assert len(kinds.findall("circle")) == 2
    assert [one.text for one in kinds.findall("text") if "rotate(-45" in one.get("transform", "")] == [
        "dense, no crop" * 3,
        "crop",
    ]
    assert float(kinds.get("height")) > float(numbers.get("height"))


def test_every_study_says_what_the_paper_found():
    assert list(FINDINGS) == list(STUDIES)


@pytest.mark.parametrize("printed", PRINTED_STUDIES, ids="-".join)
def test_printed_figures_are_of_what_a_study_varies(printed):
    study, figures = STUDIES[printed[0]], PRINTED_STUDIES[printed].figures
    assert printed[1] in study.protocols
    descriptors = list(figures.get("all", figures))
    places = {(one.series, one.x) for one in study.list_variants(descriptors)}
    assert {(series, x) for series, column in figures.items() for x in column} <= places
