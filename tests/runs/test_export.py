"""Exports hold what the index holds, and plain FAISS answers from them as the index does."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from photo_runs import index_command, parse
from synthetic_index import DIM, publish_synthetic, random_units

from ckn_scale.core import plain_index
from ckn_scale.core.vector_codes import SignCodec
from ckn_scale.core.vector_index import build_signs
from ckn_scale.errors import CorruptData, InputError
from ckn_scale.interrupts import NOTHING_KEPT
from ckn_scale.runs import export as export_module
from ckn_scale.runs.export import export_version
from ckn_scale.search.engine import open_index
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.versions import open_version
from ckn_scale.storage.index_files import make_side_table
from ckn_scale.storage.output_folders import new_folder
from ckn_scale.storage.run_folder import RunFolder

SMALLER = "IndexIDMap of IndexScalarQuantizer"


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """50 exact vectors in 3 index shards, each image with a label."""
    return publish_synthetic(tmp_path_factory.mktemp("synthetic") / "run", random_units(50), 3)


def read_images(folder):
    with (folder / "images.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def ask(folder, queries, k):
    """Scores and ids by plain FAISS alone."""
    return faiss.read_index(str(folder / "index.faiss")).search(queries, k)


def list_hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_vectors_and_names_of_a_real_run_are_those_of_its_index(grown, tmp_path, command_line):
    index, run = open_index(str(grown)), RunFolder.open(str(grown))
    said = parse(command_line("export", grown, tmp_path / "out", "--vectors", "npy", "--json"))
    assert (said["version"], said["rows"], said["dim"]) == (2, 24, index.dim)
    assert said["files"].keys() == {"vectors.npy", "ids.npy", "images.csv"}
    ids, vectors = np.load(tmp_path / "out" / "ids.npy"), np.load(tmp_path / "out" / "vectors.npy")
    assert len(open_version(run).manifest.shards) >= 2
    assert (vectors.shape, vectors.dtype, ids.dtype) == ((24, index.dim), np.float32, np.int64)
    assert (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(vectors, [index.vector(image_id) for image_id in ids.tolist()])
    images = read_images(tmp_path / "out")
    assert [int(image["image_id"]) for image in images] == ids.tolist()
    for image, vector in zip(images, vectors, strict=True):
        assert index.search_vector(vector, 1)[0].uri == image["uri"]


def test_plain_faiss_answers_as_a_real_run_does(grown, photos, tmp_path, command_line):
    index = open_index(str(grown))
    result = command_line("export", grown, tmp_path / "out", "--faiss")
    assert result.returncode == 0, result.stderr
    assert "IndexPreTransform of IndexIDMap of IndexRaBitQ" in result.stdout
    names = {int(image["image_id"]): image["uri"] for image in read_images(tmp_path / "out")}
    queries = index.encode([photo for photo in sorted(photos.glob("*.jpg")) if photo.name != "broken.jpg"])
    scores, ids = ask(tmp_path / "out", queries, 5)
    for hits, found, by_faiss in zip(index.search_vectors(queries, 5), ids, scores, strict=True):
        assert [hit.image_id for hit in hits] == found.tolist()
        assert [hit.uri for hit in hits] == [names[image_id] for image_id in found.tolist()]
        np.testing.assert_allclose([hit.score for hit in hits], by_faiss, atol=1e-4)


def test_an_earlier_version_by_its_number(grown, tmp_path):
    written = export_version(RunFolder.open(str(grown)), str(tmp_path / "one"), "parquet", 1)
    assert (written.version, written.rows) == (1, 21)
    table = pq.read_table(tmp_path / "one" / "vectors.parquet")
    index = open_index(str(grown), 1)
    assert table.column_names == ["image_id", "uri", "vector"]
    assert len(table) == 21
    for row in table.to_pylist():
        np.testing.assert_array_equal(np.float32(row["vector"]), index.vector(row["image_id"]))
    with pytest.raises(InputError, match="no version 7; published are: 1, 2"):
        export_version(RunFolder.open(str(grown)), str(tmp_path / "seven"), "npy", 7)
    assert not (tmp_path / "seven").exists()
    assert list_hidden(tmp_path) == []


def test_kept_columns_and_exact_rows_block_by_block(synthetic, tmp_path, monkeypatch):
    monkeypatch.setattr(plain_index, "BLOCK_BYTES", 4 * DIM * 7)  # 7 rows at a time
    seen: list[tuple[int, int]] = []
    run = synthetic.run
    export_version(
        run, str(tmp_path / "p"), "parquet", on_rows=lambda done, total: seen.append((done, total))
    )
    export_version(run, str(tmp_path / "n"), "npy")
    assert seen[0] == (7, 50)
    assert seen[-1] == (50, 50)
    table = pq.read_table(tmp_path / "p" / "vectors.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), DIM)
    assert table.column("label").to_pylist() == [f"label {image_id}" for image_id in range(50)]
    assert table.column("uri").to_pylist()[49] == "photos/0049.jpg"
    np.testing.assert_array_equal(np.float32(table.column("vector").to_pylist()), synthetic.vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "n" / "vectors.npy"), synthetic.vectors)
    assert read_images(tmp_path / "n")[3] == {
        "image_id": "3",
        "uri": "photos/0003.jpg",
        "label": "label 3",
    }


def test_plain_faiss_answers_as_an_exact_index_does(synthetic, tmp_path):
    written = export_version(synthetic.run, str(tmp_path / "out"), "faiss")
    assert written.index == "IndexIDMap of IndexFlatIP"
    queries = random_units(20, seed=1)
    scores, ids = ask(tmp_path / "out", queries, 10)
    group = ShardGroup(synthetic.run.store, synthetic.manifest)
    for hits, found, by_faiss in zip(group.search(queries, 10), ids, scores, strict=True):
        assert [hit.image_id for hit in hits] == found.tolist()
        np.testing.assert_allclose([hit.score for hit in hits], by_faiss, atol=1e-6)


@pytest.mark.parametrize("small_matrix", [2**28, 0])
def test_signs_with_their_rotation_or_as_what_they_stand_for(small_matrix, tmp_path, monkeypatch):
    monkeypatch.setattr(plain_index, "SMALL_MATRIX_BYTES", small_matrix)
    dim = 300  # padded to 512
    vectors = np.random.default_rng(0).standard_normal((120, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    codes, ids = SignCodec(dim).encode(vectors), np.arange(120) * 3
    parts = [build_signs(codes[:50], ids[:50], dim), build_signs(codes[50:], ids[50:], dim)]
    joined = plain_index.join_indexes(parts, "signs", dim)
    kind = "IndexPreTransform of IndexIDMap of IndexRaBitQ"
    assert plain_index.describe_index(joined) == (
        kind if small_matrix else "IndexIDMap of IndexScalarQuantizer"
    )
    faiss.write_index(joined, str(tmp_path / "index.faiss"))
    similarity, found = build_signs(codes, ids, dim).search(vectors, 3)
    scores, by_faiss = ask(tmp_path, vectors, 3)
    np.testing.assert_array_equal(by_faiss[:, 0], found[:, 0])
    np.testing.assert_allclose(scores, similarity, atol=1e-4 if small_matrix else 5e-3)
    if small_matrix:
        np.testing.assert_array_equal(by_faiss, found)


def test_a_column_without_a_value_in_one_shard_has_the_type_of_the_others():
    class Shard:
        def __init__(self, ids, kept):
            uris = [str(image_id) for image_id in ids]
            self.table = make_side_table(pa.array(ids, pa.int64()), uris, columns=pa.table({"year": kept}))
            self.living = np.ones(len(ids), bool)

    early, late = Shard([0, 1], pa.nulls(2, pa.string())), Shard([2, 3], pa.array([1999, None], pa.int64()))
    schema = export_module._schema_of_images([early, late])
    assert schema.field("year").type == pa.int64()
    rows = [export_module._read_images(shard, slice(0, 2), schema) for shard in (early, late)]
    assert pa.concat_tables(rows).column("year").to_pylist() == [None, None, 1999, None]


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    synthetic, tmp_path, command_line, monkeypatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("mine")
    run = synthetic.run
    for name in ("out", "file"):
        result = command_line("export", run.url, tmp_path / name, "--vectors", "npy")
        assert result.returncode == 2
        assert "is there already: name another folder" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"
    result = command_line("export", run.url, tmp_path / "new")
    assert (result.returncode, "one of: --vectors npy" in result.stderr) == (2, True)
    with pytest.raises(InputError, match="local folder"):
        export_version(run, "s3://bucket/out", "npy")

    def fail(done, total):
        raise CorruptData("in the middle")

    for form in export_module.FORMS:
        with pytest.raises(CorruptData, match="in the middle"):
            export_version(run, str(tmp_path / "half"), form, on_rows=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]

    def meanwhile(done, total):
        (tmp_path / "half").mkdir(exist_ok=True)
        (tmp_path / "half" / "theirs").write_text(json.dumps(done))

    with pytest.raises(InputError, match="meanwhile"):
        export_version(run, str(tmp_path / "half"), "npy", on_rows=meanwhile)
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["theirs"]
    assert list_hidden(tmp_path) == []


def test_a_folder_inside_the_run_is_refused(synthetic, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(synthetic.run.url)
    for place in (f"{synthetic.run.url}/index/out", str(link / "out")):
        with pytest.raises(InputError, match="lies in the run folder"):
            export_version(synthetic.run, place, "npy")


def test_what_a_killed_export_left_goes_with_the_next_one_to_the_same_place(
    synthetic, tmp_path, command_line
):
    url, out = synthetic.run.url, tmp_path / "out"
    kill = {"CKN_SCALE_FAILPOINT": "data_written:output_folder"}
    for _ in range(2):  # the second removes what the first left, and leaves its own
        command_line("export", url, out, "--vectors", "npy", env=kill)
        assert len(list_hidden(tmp_path)) == 1
    with new_folder(str(out), synthetic.run) as other:  # one that is being written now stays
        assert [tmp_path / name for name in list_hidden(tmp_path)] == [other]
        result = command_line("export", url, out, "--vectors", "npy")
        assert result.returncode == 0, result.stderr
        assert other.is_dir()
        shutil.rmtree(out)
    assert list_hidden(tmp_path) == []


def test_an_interrupted_export_says_that_it_starts_over(synthetic, tmp_path, user_env):
    environment = {**user_env, "CKN_SCALE_FAILPOINT": "data_written:output_folder:0:STOP"}
    command = index_command("export", synthetic.run.url, tmp_path / "out", "--faiss", "--quiet")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, f"{NOTHING_KEPT}\n")
    assert list(tmp_path.iterdir()) == []
