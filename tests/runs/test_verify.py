"""`verify` finds damage of any kind by name, changes nothing, and is content with a run that is whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
from grown_runs import flip_bit, list_files
from photo_runs import copy_trained, index_here

from ckn_scale.core.images import encode_jpeg
from ckn_scale.demo import read_photo
from ckn_scale.errors import CorruptData
from ckn_scale.runs.verify import verify_run
from ckn_scale.runs.versions import roll_back
from ckn_scale.steps.publish import remove_samples
from ckn_scale.storage.index_files import read_manifest, write_manifest
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import read_table, write_file


def verify(run):
    return verify_run(RunFolder.open(str(run)))


def problem_paths(run):
    return [problem.path for problem in verify(run).problems]


def manifest_of(run, version=2):
    opened = RunFolder.open(str(run))
    return read_manifest(opened.store, opened.versions.read(version).manifest)


KINDS = {
    "plan": lambda run, version: "plan/000001.json",
    "second segment": lambda run, version: "plan/000002.json",
    "numerics": lambda run, version: "numerics/000001.json",
    "models": lambda run, version: "models/000001.json",
    "version": lambda run, version: "index/000002.json",
    "older version": lambda run, version: "index/000001.json",
    "training record": lambda run, version: "commits/train_codebook/00000.1.json",
    "encoding record": lambda run, version: "commits/encode_images/00003.1.json",
    "build record": lambda run, version: f"commits/{'build_index'}/{built_number(run):05d}.1.json",
    "certifying record": lambda run, version: next_file(
        run, f"commits/certify_index-{version.certificate.draw}"
    ),
    "plan table": lambda run, version: next_file(run, "images/000001-*"),
    "sample list": lambda run, version: next_file(run, "samples/images"),
    "query list": lambda run, version: next_file(run, "queries/images"),
    "sample": lambda run, version: next_file(run, "samples/patches"),
    "model": lambda run, version: next_file(run, "models", "codebook-*.safetensors"),
    "vectors": lambda run, version: next_file(run, "vectors"),
    "descriptors": lambda run, version: next_file(run, "descriptors"),
    "thumbnails": lambda run, version: next_file(run, "thumbnails"),
    "manifest": lambda run, version: version.manifest.path,
    "index shard": lambda run, version: manifest_of(run).shards[-1].index.path,
    "side table": lambda run, version: manifest_of(run).shards[0].table.path,
    "points": lambda run, version: manifest_of(run).shards[0].points.path,
    "older index shard": lambda run, version: manifest_of(run, 1).shards[-1].index.path,
    "draw": lambda run, version: f"queries/{version.certificate.draw}.json",
    "outcomes": lambda run, version: version.certificate.outcomes.path,
    "planted queries": lambda run, version: next_file(run, f"queries/{version.certificate.draw}"),
}
PASSED_OVER_WHEN_GONE = {"models", "numerics", "version", "older version", "training record", "sample"}
PASSED_OVER_WHEN_GONE |= {"build record", "certifying record"}


def next_file(run, folder, name="*"):
    return str(min(run.glob(f"{folder}/{name}")).relative_to(run))


def built_number(run):
    opened = RunFolder.open(str(run))
    path = manifest_of(run).shards[-1].index.path
    return next(
        number
        for number, commit in opened.commits("build_index").committed().items()
        if commit.files["index"].path == path
    )


def path_of(run, kind):
    return KINDS[kind](run, RunFolder.open(str(run)).versions.read(2))


def test_a_whole_run_is_well_and_left_as_it_is(run, command_line):
    before = list_files(run)
    found = verify(run)
    assert (found.problems, found.notes) == ([], [])
    assert (found.version, found.images) == (2, 25)
    assert found.files > 70
    result = command_line("verify", run)
    assert (result.returncode, result.stderr) == (0, f"verifying {run} …\n")
    assert result.stdout.startswith("version 2, 25 images, ")
    assert result.stdout.endswith(": all is well\n")
    assert list_files(run) == before


@pytest.mark.parametrize("change", ["samples removed", "rolled back", "rolled back and published again"])
def test_what_is_done_to_a_run_on_purpose_is_no_problem(run, new_photos, change):
    opened = RunFolder.open(str(run))
    if change == "samples removed":
        before = verify(run).files
        remove_samples(opened)
        assert verify(run).files < before
    else:
        roll_back(opened)
    if change.endswith("again"):
        index_here(new_photos, run, append=True)
    found = verify(run)
    assert (found.problems, found.notes) == ([], [])


def test_replaced_images_and_failures_that_were_retried_are_no_problem(
    photos, reference, tmp_path, command_line
):
    own, run = shutil.copytree(photos, tmp_path / "own"), tmp_path / "run"
    options = {"models": str(reference), "accept": True}
    index_here(own, run, **options)
    (own / "coffee.jpg").write_bytes(encode_jpeg(read_photo("retina"), 95))
    index_here(own, run, append=True, **options)
    found = verify(run)
    assert (found.problems, found.notes, found.images) == ([], [], 23)
    (own / "broken.jpg").write_bytes(encode_jpeg(read_photo("ihc"), 90))
    retried = command_line("failures", run, "--retry", "--workers", "0")
    assert retried.returncode == 0, retried.stderr
    found = verify(run)
    assert found.problems == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_by_name(run, kind):
    path = path_of(run, kind)
    flip_bit(run / path)
    found = verify(run).problems
    assert path in [problem.path for problem in found]
    if kind not in ("plan", "second segment", "models"):  # what is known only by them cannot be looked at
        assert len(found) == 1, found
    assert all(problem.remedy for problem in found)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PASSED_OVER_WHEN_GONE])
def test_a_lost_file_is_found_by_name(run, kind):
    path = path_of(run, kind)
    (run / path).unlink()
    paths = problem_paths(run)
    assert paths == [path]


def test_a_damaged_manifest_is_found_once_though_a_rollback_names_it_too(run):
    opened = RunFolder.open(str(run))
    path = opened.versions.read(1).manifest.path
    roll_back(opened)
    flip_bit(run / path)
    found = verify(run)
    assert [problem.path for problem in found.problems] == [path]
    assert found.notes == []


def test_a_file_that_cannot_be_read_is_found(run):
    path = path_of(run, "thumbnails")
    (run / path).unlink()
    (run / path).mkdir()
    assert problem_paths(run) == [path]


def test_tables_of_two_shards_that_were_swapped_are_found(run):
    first, second = (run / shard.table.path for shard in manifest_of(run).shards[:2])
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    assert sorted(problem_paths(run)) == sorted(str(path.relative_to(run)) for path in (first, second))


def publish_changed(run, change):
    """The next version with the manifest that `change` makes of the current one, as if all was well."""
    opened = RunFolder.open(str(run))
    latest = opened.versions.latest()
    manifest = change(opened, read_manifest(opened.store, latest.manifest))
    file = write_manifest(opened.store, opened.index_folder(manifest.build, new_attempt()), manifest)
    opened.versions.append(replace(latest, manifest=file, rows=manifest.rows))


def test_images_that_an_index_shard_lacks_are_found_though_all_checksums_fit(run):
    """The first two shards' tables change places, in a manifest that is published."""

    def swap(opened, manifest):
        one, two = manifest.shards[:2]
        swapped = (replace(one, table=two.table), replace(two, table=one.table))
        return replace(manifest, shards=(*swapped, *manifest.shards[2:]))

    publish_changed(run, swap)
    found = verify(run).problems
    assert [problem.path for problem in found] == [
        shard.table.path for shard in manifest_of(run, 3).shards[:2]
    ]
    assert all("the manifest says" in problem.what for problem in found)


def test_a_row_too_few_is_found_though_all_checksums_fit(run):
    """An index shard without its last image, as a faulty release might have built it."""
    lost = []

    def drop_row(opened, manifest):
        shard = manifest.shards[0]
        table = pa.ipc.open_file(str(run / shard.table.path)).read_all().slice(0, shard.rows - 1)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        path = f"{opened.index_folder(0, new_attempt())}/shard-00000.arrow"
        written = write_file(opened.store, path, sink.getvalue().to_pybytes(), len(table))
        lost.append(shard.last_id)
        ids = table.column("image_id").to_pylist()
        shorter = replace(shard, table=written, rows=len(ids), last_id=ids[-1])
        return replace(manifest, rows=manifest.rows - 1, shards=(shorter, *manifest.shards[1:]))

    publish_changed(run, drop_row)
    found = {problem.path: problem.what for problem in verify(run).problems}
    shard = manifest_of(run, 3).shards[0]
    assert found.keys() == {"index/000003.json", *(file.path for file in shard.files)}
    assert "23 and 24 do not agree" in found["index/000003.json"]
    assert found[shard.table.path] == f"it lacks images: {lost[0]}"


def supersede(run, stage, shard_id, change):
    """The next generation of an encoded shard, with a table that was changed."""
    opened = RunFolder.open(str(run))
    log = opened.commits("encode_images")
    commit, attempt = log.committed()[shard_id], new_attempt()
    table = change(read_table(opened.store, commit.files[stage]))
    files = {**commit.files, stage: opened.write_table(stage, shard_id, attempt, table)}
    assert log.commit(replace(commit, generation=2, attempt=attempt, files=files, supersedes=1))[1]
    return files[stage].path


def set_column(table, name, values):
    place = table.schema.get_field_index(name)
    column = pa.array(values, table.schema.field(place).type)
    return table.set_column(place, table.schema.field(place), column)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("image_id", lambda ids: [ids[0], ids[0]], "it lacks images: 7"),
        ("image_id", lambda ids: ids[::-1], "not in ascending order"),
        ("state", lambda states: ["ok", "corrupt"], "its record says"),
        ("state", lambda states: ["ok", "fine"], "it has states that there are not"),
        ("vector", lambda vectors: [vectors[0], None], "have no vector"),
    ],
)
def test_an_image_without_one_state_is_found(run, name, change, said):
    path = supersede(
        run, "vectors", 3, lambda table: set_column(table, name, change(table[name].to_pylist()))
    )
    found = verify(run)
    assert [problem.path for problem in found.problems] == [path]
    assert said in found.problems[0].what
    assert len(found.notes) == 1, "its index shard was built of other vectors"


@pytest.mark.parametrize(
    "kind", ["vectors", "index shard", "older index shard", "manifest", "model", "encoding record"]
)
def test_what_index_check_rebuilds_is_well_afterwards(run, photos, kind):
    path = path_of(run, kind)
    flip_bit(run / path)
    assert problem_paths(run) == [path]
    try:
        index_here(photos, run, check_all=True)
    except CorruptData:
        pytest.fail(f"{kind} was not repaired")
    assert verify(run).problems == []


def test_an_unfinished_run_is_no_problem(reference, tmp_path, command_line):
    run = copy_trained(reference, tmp_path / "run")
    found = verify(run)
    assert found.problems == []
    assert [note.path for note in found.notes] == ["plan/000001.json"]
    result = command_line("verify", run)
    assert (result.returncode, result.stdout.splitlines()[0]) == (
        0,
        "note: plan/000001.json: 11 of its 11 shards are not encoded yet; `ckn-scale index` goes on",
    )


def test_problems_are_lines_and_exit_code_1(run, command_line):
    paths = [path_of(run, kind) for kind in ("vectors", "model")]
    for path in paths:
        flip_bit(run / path)
    plain = command_line("verify", run, "--quiet")
    assert (plain.returncode, plain.stderr) == (1, "")
    *lines, last = plain.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == paths
    assert all(
        "damaged" in line and f"`ckn-scale index IMAGES {run} --check` rebuilds it" in line for line in lines
    )
    assert last.endswith(": 2 problems")
    said = command_line("verify", run, "--json")
    assert said.returncode == 1
    body = json.loads(said.stdout)
    assert [problem["path"] for problem in body["problems"]] == paths
    assert body["version"] == 2


def test_a_run_on_an_object_store_is_rolled_back_and_verified(grown, s3):
    store = Store(s3.url("run"))
    for path in list_files(grown):
        store.write_new(path, (grown / path).read_bytes())
    run = RunFolder.open(store.url)
    assert roll_back(run).number == 3
    found = verify_run(run)
    assert (found.problems, found.notes, found.version) == ([], [], 3)
    lost, damaged = (path_of(grown, kind) for kind in ("descriptors", "side table"))
    store.delete(lost)
    store.fs.pipe_file(store.address(damaged), b"damage")
    assert sorted(problem.path for problem in verify_run(run).problems) == sorted([lost, damaged])


def test_progress_counts_files(run):
    seen = []
    found = verify_run(RunFolder.open(str(run)), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] <= found.files
    assert seen == sorted(seen)
