"""What changing a large collection costs: append, delete, sync, purge, each as a call of the command line.

    python benchmarks/changes.py PHOTOS [--images 100000] [--new 3] [--models RUN] [--set KEY=VALUE …]

PHOTOS is a folder of a few hundred photographs. The first of them are indexed as ever, a small run. Then so
many hard links to them are planned as its second segment; their shards get the rows of the first ones, a
tenth of the vectors' bits turned, because encoding them all would take hours and is not what is measured.
From there on everything is real: build, certify, publish, and each change in a process of its own, with
--workers 0.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa

from ckn_scale import pipeline
from ckn_scale.config import Resources, Settings, load_settings
from ckn_scale.core.vector_codes import SIGN_FACTOR_BYTES
from ckn_scale.runners.driver import open_driver
from ckn_scale.schemas import read_codes
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import plan_images
from ckn_scale.storage.records import new_attempt
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import read_table

FEW = 60  # photographs that are encoded


def link_photos(photos: Path, folder: Path, count: int) -> None:
    """`count` images in folders of a thousand, each a link to one of the photographs."""
    found = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    copies = [folder.parent / f"copy-{number}.jpg" for number in range(min(len(found), 500))]
    for source, copy in zip(found, copies, strict=False):
        if not copy.exists():
            copy.write_bytes(source.read_bytes())
    for number in range(count):
        target = folder / f"{number // 1000:04d}" / f"{number:07d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(copies[number % len(copies)], target)


def fill_shards(run: RunFolder) -> None:
    """Commit every shard that is not encoded with rows like those that are."""
    step = EncodeImages(run)
    encoded = step.log.committed()
    first = [encoded[shard_id] for shard_id in range(step.plan.segments[0].next_shard)]
    tables = {
        stage: pa.concat_tables(read_table(run.store, commit.files[stage]) for commit in first)
        for stage in first[0].files
    }
    for shard_id in step.shard_ids():
        if shard_id in encoded:
            continue
        planned, attempt = step.plan.read_shard(shard_id), new_attempt()
        ids = [image.image_id for image in planned]
        written = {
            stage: run.write_table(stage, shard_id, attempt, renumber(table, ids))
            for stage, table in tables.items()
        }
        commit = Commit(step.label, shard_id, 1, attempt, step.fingerprint, written, {"ok": len(ids)})
        step.log.commit(commit)


def renumber(table: pa.Table, ids: list[int]) -> pa.Table:
    """So many rows of a table, under other ids."""
    table = table.take(np.arange(len(ids)) % len(table))
    table = table.set_column(0, table.schema.field(0), pa.array(ids, pa.int64()))
    encoding = (table.schema.metadata or {}).get(b"encoding")
    return turn_bits(table, ids[0]) if encoding == b"signs" and len(ids) else table


def turn_bits(vectors: pa.Table, seed: int) -> pa.Table:
    """The same signs but for a tenth of them, so that rows are no copies of each other."""
    codes, rng = read_codes(vectors).copy(), np.random.default_rng(seed)
    signs = codes[:, :-SIGN_FACTOR_BYTES]
    for row in signs:
        row ^= np.packbits(rng.random(8 * signs.shape[1], np.float32) < 0.1)
    place = vectors.column_names.index("vector")
    column = pa.array([row.tobytes() for row in codes], vectors.schema.field(place).type)
    return vectors.set_column(place, vectors.schema.field(place), column)


def make_run(few: Path, images: Path, run_url: str, settings: Settings, models: str | None) -> None:
    planned = Path(run_url).exists() and len(RunFolder.open(run_url).plan.all()) == 2
    if not planned:
        pipeline.index_images(str(few), run_url, settings, Resources(workers=0), accept=True, models=models)
        plan_images(run_url, settings, str(images), append=True)
    run = RunFolder.open(run_url)
    fill_shards(run)
    with open_driver(run, Resources(workers=0), lambda progress: None) as driver:
        pipeline.publish(driver, accept=True)


def time_verb(what: str, *arguments: str) -> None:
    begun, used = time.perf_counter(), _cpu_seconds()
    command = [str(Path(sys.executable).parent / "ckn-scale"), *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    wall_s, cpu_s = time.perf_counter() - begun, _cpu_seconds() - used
    print(f"{what:<26}{wall_s:7.1f} s{cpu_s:7.1f} s of CPU   {' | '.join(said)}", flush=True)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--new", type=int, default=3)
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--models", help="a run whose models are used")
    parser.add_argument("--folder", type=Path, help="where everything lies, and stays")
    parser.add_argument("--no-purge", dest="purge", action="store_false", help="it writes all shards anew")
    parser.add_argument("--make-only", action="store_true", help="end with the run; call again to go on")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    chosen = ["--preset", options.preset, *(part for one in options.overrides for part in ("--set", one))]
    local = [*chosen, "--workers", "0", "--quiet", "--accept"]
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        few, images, more = folder / "few", folder / "images", folder / "more"
        run = str(folder / "run")
        link_photos(options.photos, images, options.images)
        link_photos(options.photos, few, FEW)
        begun = time.perf_counter()
        make_run(few, images, run, load_settings(options.preset, None, options.overrides), options.models)
        print(f"a run of {options.images} images: {time.perf_counter() - begun:.0f} s", flush=True)
        if options.make_only:
            return
        more.mkdir(exist_ok=True)
        for number in range(options.new):
            os.link(folder / f"copy-{number}.jpg", more / f"new-{number}.jpg")
        time_verb(f"append {options.new}", "index", str(more), run, "--append", *local)
        time_verb("delete 3 by id", "delete", run, "5", str(options.images // 2), str(options.images))
        (folder / "uris.txt").write_text(
            "\n".join(str(path) for path in sorted(images.rglob("*7.jpg"))[:1000])
        )
        time_verb("delete up to 1,000 by URI", "delete", run, "--uris", str(folder / "uris.txt"))
        for path in sorted(images.rglob("*.jpg"))[3::1000]:
            path.unlink()
        time_verb("sync, 1 of 1,000 gone", "index", str(images), run, "--sync", *local)
        if options.purge:
            time_verb("purge", "purge", run, "--workers", "0", "--quiet", "--accept")
        time_verb("verify", "verify", run, "--quiet")


if __name__ == "__main__":
    main()
