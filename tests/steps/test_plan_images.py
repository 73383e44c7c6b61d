from __future__ import annotations

import pyarrow as pa
import pytest

from ckn_scale.config import load_settings
from ckn_scale.errors import CorruptData, InputError, RunMismatch
from ckn_scale.runs.collect_garbage import find_garbage
from ckn_scale.schemas import PLANNED_IMAGES
from ckn_scale.steps import plan_images as plan_step
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.storage.plans import PlanReader, hash_uri, read_sample, read_segments, shard_size


@pytest.fixture
def folder(tmp_path):
    for number in range(11):
        path = tmp_path / "images" / f"{number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (number + 1))
    return str(tmp_path / "images")


def settings(*overrides):
    return load_settings("tiny", None, ["plan.images_per_shard=4", "sample.num_images=5", *overrides])


def test_plan_images_gives_dense_ids_in_sorted_order(folder, tmp_path):
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    (segment,) = read_segments(run)
    reader = PlanReader(run, [segment])
    images = [image for shard in range(segment.num_shards) for image in reader.read_shard(shard)]
    assert [len(reader.read_shard(shard)) for shard in range(3)] == [4, 4, 3]
    assert [image.image_id for image in images] == list(range(11))
    assert [image.uri for image in images] == sorted(image.uri for image in images)
    assert {image.size_bytes for image in images} == set(range(1, 12))


def test_plan_images_is_frozen_after_the_first_call(folder, tmp_path):
    plan_images(str(tmp_path / "run"), settings(), folder)
    (tmp_path / "images" / "0" / "new.jpg").write_bytes(b"late")
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    assert read_segments(run)[0].num_images == 11


def test_sample_is_the_smallest_hashes_whatever_the_sharding(folder, tmp_path):
    samples = []
    for number, size in enumerate((1, 3, 100)):
        run = plan_images(str(tmp_path / f"run{number}"), settings(f"plan.images_per_shard={size}"), folder)
        samples.append([image.uri for image in read_sample(run, read_segments(run))])
    uris = sorted(str(path) for path in (tmp_path / "images").rglob("*.jpg"))
    by_hash = sorted(uris, key=lambda uri: hash_uri(0, uri))[:5]
    assert samples[0] == samples[1] == samples[2] == sorted(by_hash)


@pytest.mark.parametrize(
    ("images", "largest", "size"),
    [
        (1, 256, 4),
        (70, 256, 4),
        (256, 256, 4),
        (257, 256, 5),
        (10_000, 256, 157),
        (10**6, 256, 256),
        (70, 2, 2),
    ],
)
def test_shard_size_cuts_small_sets_into_up_to_64_shards(images, largest, size):
    assert shard_size(images, largest) == size


def test_plan_images_gives_a_small_set_many_shards(folder, tmp_path):
    run = plan_images(str(tmp_path / "run"), settings("plan.images_per_shard=256"), folder)
    reader = PlanReader(run, read_segments(run))
    assert [len(reader.read_shard(shard)) for shard in range(3)] == [4, 4, 3]
    assert [*SamplePatches(run).shard_ids()] == [0, 1], "the 5 images of the sample too"


def test_hash_uri_is_the_same_on_every_machine():
    assert hash_uri(0, "s3://bucket/a.jpg") == 17997550867763933928
    assert hash_uri(0, "s3://bucket/a.jpg") != hash_uri(1, "s3://bucket/a.jpg")


def test_plan_images_refuses_an_empty_folder_and_writes_nothing(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(InputError):
        plan_images(str(tmp_path / "run"), settings(), str(tmp_path / "images"))
    assert not (tmp_path / "run").exists()


def test_plan_images_refuses_other_settings(folder, tmp_path):
    plan_images(str(tmp_path / "run"), settings(), folder)
    with pytest.raises(RunMismatch, match=r"vlad\.seed"):
        plan_images(str(tmp_path / "run"), settings("vlad.seed=9"), folder)


def add_images(folder, *names):
    """Files in `folder`, which is made; the path of it."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(name.encode())
    return str(folder)


def planned_names(run):
    segments = read_segments(run)
    reader = PlanReader(run, segments)
    shards = range(sum(segment.num_shards for segment in segments))
    images = [image for shard in shards for image in reader.read_shard(shard)]
    assert [image.image_id for image in images] == list(range(len(images)))
    return [image.uri.rpartition("/")[2] for image in images]


def race(monkeypatch, rival):
    """Lets `rival` plan in the moment before the next plan record is written, once."""
    rivals = [rival]
    monkeypatch.setattr(plan_step, "hit_failpoint", lambda *place: rivals.pop()() if rivals else None)


def test_plan_images_that_loses_an_append_adds_what_is_new_to_the_current_plan(tmp_path, monkeypatch):
    first, mine = add_images(tmp_path / "a", "1.jpg"), add_images(tmp_path / "b", "2.jpg", "3.jpg")
    url = str(tmp_path / "run")
    plan_images(url, settings(), first)
    shared = str(tmp_path / "b" / "2.jpg")  # both have it: it is planned once
    race(monkeypatch, lambda: plan_images(url, settings(), shared, append=True))
    run = plan_images(url, settings(), mine, append=True)
    assert planned_names(run) == ["1.jpg", "2.jpg", "3.jpg"]
    assert [segment.num_images for segment in read_segments(run)] == [1, 1, 1]
    lost = find_garbage(run, grace_s=0)
    of_the_loser = {"images/000002", "samples/images/00002", "queries/images/00002"}
    assert {path.split("-")[0] for path in lost} == of_the_loser
    assert len(lost) == 3


def test_plan_images_of_the_same_source_at_once_make_one_plan(folder, tmp_path, monkeypatch):
    url = str(tmp_path / "run")
    race(monkeypatch, lambda: plan_images(url, settings(), folder))
    run = plan_images(url, settings(), folder)
    assert [segment.num_images for segment in read_segments(run)] == [11]


def test_first_plan_that_loses_to_another_source_is_refused(folder, tmp_path, monkeypatch):
    url, other = str(tmp_path / "run"), add_images(tmp_path / "other", "1.jpg")
    race(monkeypatch, lambda: plan_images(url, settings(), other))
    with pytest.raises(RunMismatch, match=r"was planned from .*/other, not from .*/images"):
        plan_images(url, settings(), folder)


@pytest.mark.parametrize("other", ["full", "empty", "absent", "list.txt"])
def test_another_source_is_refused_without_append(folder, tmp_path, other):
    add_images(tmp_path / "full", "1.jpg")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text(f"{tmp_path}/full/1.jpg\n")
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    with pytest.raises(RunMismatch) as refusal:
        plan_images(run.url, settings(), str(tmp_path / other))
    for words in (f"planned from {folder}", str(tmp_path / other), "--append", "another run folder"):
        assert words in str(refusal.value)
    assert len(read_segments(run)) == 1


def test_the_source_of_any_segment_goes_on_however_it_is_written(folder, tmp_path, monkeypatch):
    more = add_images(tmp_path / "more", "1.jpg")
    url = str(tmp_path / "run")
    plan_images(url, settings(), folder)
    plan_images(url, settings(), [f"{more}/1.jpg", more], append=True)
    monkeypatch.chdir(tmp_path)
    for same in (f"{folder}/", "images", "./images/", [folder], f"file://{folder}", ["more", "more/1.jpg"]):
        assert len(read_segments(plan_images(url, settings(), same))) == 2
    with pytest.raises(RunMismatch, match="and 1 more"):
        plan_images(url, settings(), [f"{number}.jpg" for number in range(4)])


def test_a_list_that_was_edited_is_told_and_the_plan_stays(folder, tmp_path, caplog):
    images = add_images(tmp_path / "b", "1.jpg", "2.jpg")
    listed = tmp_path / "list.txt"
    listed.write_text(f"{images}/1.jpg\n")
    url = str(tmp_path / "run")
    plan_images(url, settings(), str(listed))
    plan_images(url, settings(), str(listed))
    assert caplog.records == []
    listed.write_text(f"{images}/2.jpg\n{images}/1.jpg\n")
    run = plan_images(url, settings(), str(listed))
    assert planned_names(run) == ["1.jpg"]
    assert "list.txt changed after" in caplog.text
    assert "--append" in caplog.text


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("hurt", ["cut", "gone"])
def test_nothing_is_planned_over_a_damaged_record(folder, tmp_path, number, hurt):
    url = str(tmp_path / "run")
    plan_images(url, settings(), folder)
    for name in ("b", "c"):
        plan_images(url, settings(), add_images(tmp_path / name, "1.jpg"), append=True)
    record = tmp_path / "run" / "plan" / f"00000{number}.json"
    if hurt == "gone":
        record.unlink()
    else:
        record.write_bytes(record.read_bytes()[:100])
    for append in (True, False):
        with pytest.raises(CorruptData, match=rf"plan/00000{number}\.json is (gone|not a whole record)"):
            plan_images(url, settings(), folder, append=append)


def test_plan_reader_finds_what_another_process_appended(folder, tmp_path):
    run = plan_images(str(tmp_path / "run"), settings(), folder)
    reader = PlanReader(run, read_segments(run))
    plan_images(run.url, settings(), add_images(tmp_path / "more", "new.jpg"), append=True)
    assert [image.uri.rpartition("/")[2] for image in reader.read_shard(3)] == ["new.jpg"]


def test_run_among_its_images_is_not_planned_itself(folder, tmp_path):
    inside = f"{folder}/runs/a"
    run = plan_images(inside, settings(), folder)
    assert read_segments(run)[0].num_images == 11
    (tmp_path / "images" / "new.jpg").write_bytes(b"new")
    for url in (inside, f"{folder}/runs/b"):  # its own run folder, and that of another run
        run = plan_images(url, settings(), folder, append=True)
    assert [segment.num_images for segment in read_segments(plan_images(inside, settings(), folder))] == [
        11,
        1,
    ]
    assert [segment.num_images for segment in read_segments(run)] == [12]


def test_run_in_the_image_folder_itself_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="give the run a folder of its own"):
        plan_images(f"{folder}/", settings(), folder)
    assert not (tmp_path / "images" / "run.json").exists()


def write_list(tmp_path, name: str, text: str) -> str:
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def kept_rows(run) -> list[dict]:
    segments = read_segments(run)
    reader = PlanReader(run, segments)
    tables = [reader.read_table(shard) for shard in range(sum(segment.num_shards for segment in segments))]
    return pa.concat_tables(tables).drop_columns(PLANNED_IMAGES.names).to_pylist()


def test_kept_columns_have_one_type_for_the_whole_run(tmp_path):
    """Two shards a segment; the note is empty in the first segment and a number's text nowhere."""
    first = write_list(tmp_path, "a.csv", "path,code,price,note\n0.jpg,007,3,\n1.jpg,8,4,\n")
    second = write_list(tmp_path, "b.csv", "path,code,price,note\n2.jpg,9,,fine\n3.jpg,10,5,\n")
    keep, small = ["code", "price", "note"], settings("plan.images_per_shard=1")
    run = plan_images(str(tmp_path / "run"), small, first, keep)
    assert read_segments(run)[0].columns == {"code": "text", "price": "int", "note": "null"}
    run = plan_images(str(tmp_path / "run"), small, second, keep, append=True)
    assert read_segments(run)[1].columns == {"code": "text", "price": "int", "note": "text"}
    assert kept_rows(run) == [
        {"code": "007", "price": 3, "note": None},
        {"code": "8", "price": 4, "note": None},
        {"code": "9", "price": None, "note": "fine"},
        {"code": "10", "price": 5, "note": ""},
    ]


def test_append_that_does_not_fit_the_columns_is_refused(tmp_path):
    first = write_list(tmp_path, "a.csv", "path,price\n0.jpg,3\n")
    other = write_list(tmp_path, "b.csv", "path,price,colour\n1.jpg,cheap,red\n")
    url = str(tmp_path / "run")
    plan_images(url, settings(), first, ["price"])
    with pytest.raises(InputError, match="the column price holds int in this run, and text here"):
        plan_images(url, settings(), other, ["price"], append=True)
    with pytest.raises(InputError, match="the run keeps price: colour cannot be added"):
        plan_images(url, settings(), other, ["colour"], append=True)
    run = plan_images(url, settings(), other, append=True)  # nothing kept: empty for these
    assert kept_rows(run) == [{"price": 3}, {"price": None}]


def test_reserved_names_are_refused_before_anything_is_written(tmp_path):
    listed = write_list(tmp_path, "a.csv", "path,thumbnail\n0.jpg,x\n")
    with pytest.raises(InputError, match="cannot be named thumbnail"):
        plan_images(str(tmp_path / "run"), settings(), listed, ["thumbnail"])
    assert not (tmp_path / "run").exists()


def test_plan_images_refuses_other_kept_columns_than_the_plan_has(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "list.csv").write_text("uri,title,price\na.jpg,one,2\n")

    def again(*keep):
        return plan_images(str(tmp_path / "run"), settings(), str(tmp_path / "list.csv"), keep)

    again("title")
    assert read_segments(again())[0].columns == {"title": "text"}, "none asked for: those of the plan"
    again("title", "title")
    refusal = r"planned with --keep title, not with --keep title --keep price: leave --keep out"
    with pytest.raises(RunMismatch, match=refusal):
        again("title", "price")
    plan_images(str(tmp_path / "bare"), settings(), str(tmp_path / "list.csv"))
    with pytest.raises(RunMismatch, match="planned with no --keep, not with --keep price"):
        plan_images(str(tmp_path / "bare"), settings(), str(tmp_path / "list.csv"), ["price"])
